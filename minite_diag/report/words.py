"""Sentences about a run's summary, shared by the terminal and the HTML report.

Knows the summary object only. Invariant: each sentence holds only what the summary states.
"""

from __future__ import annotations

from typing import Any, Final


def visible(text: str) -> str:
    """Text on one line without control characters: a name may not move a terminal's cursor."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def number(value: Any) -> str:
    """A measured number, four significant digits; exact zero is `0`, nothing is a dash."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.4g}"


def name_of(engine: dict[str, Any]) -> str:
    """`te-ref 0.1 (cpu, bfloat16)`: what really ran."""
    label = engine.get("label") or engine["engine"]
    details = ", ".join(str(engine[k]) for k in ("device", "dtype") if engine.get(k))
    version = f" {engine['version']}" if engine.get("version") else ""
    return f"{label}{version}" + (f" ({details})" if details else "")


def headline(summary: dict[str, Any]) -> str:
    """The verdict in one sentence."""
    failed = [e for e in summary["engines"] if e["status"] not in ("ok", "truncated")]
    if failed:
        return "could not measure: " + "; ".join(
            f"{e['id']}: {(e['error'] or {}).get('message', e['status'])}" for e in failed
        )
    gate = summary.get("gate")
    if gate:
        more = f"; {len(gate['reasons']) - 1} more" if len(gate["reasons"]) > 1 else ""
        reason = f": {gate['reasons'][0]}{more}" if gate["reasons"] else ""
        return f"{gate['verdict']} (profile {gate['profile']}){reason}"
    strange = [c for p in summary["pairs"] if not p["comparable"] for c in p["causes"][:1]]
    if strange:
        return f"not comparable: {strange[0]['text']}"
    return "measured" if summary["pairs"] else "nothing was compared"


def check(found: dict[str, Any]) -> str:
    """One check of the gate: where, value, interval, limit, and why if it isn't clear."""
    place = found["worst"] or found["mode"]
    name = f"{found['sampler']} {place} {found['metric']}".replace("  ", " ")
    if found["estimate"] is None:
        return f"{name}: {found['reason']}"
    ends = "" if found["low"] is None else f" [{number(found['low'])}, {number(found['high'])}]"
    against = "baseline" if found["rule"] == "baseline" else "limit"
    text = f"{name} {number(found['estimate'])}{ends}, {against} {number(found['limit'])}"
    return f"{text}: {found['reason']}" if found["reason"] else text


def gap(pair: dict[str, Any]) -> str:
    """The log-probability gap of one pair."""
    modes = pair["logprob"]
    parts = []
    for mode in ("sample", "score"):
        found = modes.get(mode)
        if found and found["tokens"]:
            parts.append(
                f"{mode}: mean |dlogp| {number(found['mean_abs'])}, max {number(found['max_abs'])} "
                f"over {found['tokens']} tokens ({found['equal']} bitwise equal)"
            )
    return "; ".join(parts) or "no common log-probabilities"


def divergence(pair: dict[str, Any]) -> str:
    """Where the bits first differ, and whether what went in was equal."""
    first = pair["first_divergence"]
    if first is None:
        if not pair["sites"]["compared"]:
            return "no site was compared"
        text = f"none: all {pair['sites']['compared']} compared tensors are bitwise equal"
        sample = pair["logprob"].get("sample")
        if sample and sample["max_abs"] > 0.0:
            text += "; sampled tokens differ, whose tensors --capture-sample keeps"
        return text
    said = {True: "equal", False: "already different", None: "not seen"}
    text = (
        f"{first['site']}:{first['kind']} (token {first['position']} of {first['probe']}; "
        f"its input is {said[first['input_equal']]}, "
        f"its weights are {_weights(first['weights_equal'])})"
    )
    if first["skipped_before"]:
        text += f"; {first['skipped_before']} earlier sites could not be compared"
    return text


def _weights(equal: bool | None) -> str:
    return {True: "equal", False: "different", None: "not compared"}[equal]


def evidence(engine: dict[str, Any]) -> str:
    """Ops by who computed them, such as `native: norm, rope; modelled: linear`."""
    groups: dict[str, list[str]] = {}
    for item in engine["evidence"]:
        groups.setdefault(item["status"], []).append(item["op"])
    parts = [f"{status}: {', '.join(dict.fromkeys(ops))}" for status, ops in groups.items()]
    return "; ".join(parts) or "-"


def worth(cause: dict[str, Any]) -> str:
    """` [0.27 nats in linear]` where the live half measured it, ` [noise]` below the floor."""
    if cause.get("below_noise"):
        return " [noise: within what the engines differ from themselves]"
    effects = cause.get("effect") or []
    texts = [f"{number(effect['nats'])} nats in {effect['op']}" for effect in effects]
    return f" [{', '.join(texts)}]" if texts else ""


def live_lines(live: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, sentence) of the live attribution of one pair."""
    lines = [("noise floor", noise(live["legs"]))]
    born = local_by_op(live["local"])
    split = [o for o in born if o["split"]]
    if split:
        text = ", ".join(
            f"{o['op']} {number(o['error'])} ({o['split']} of {o['sites']} sites)" for o in split
        )
        lines.append(("born in", f"{text}; local error on the learner's own inputs"))
    equal = [o["op"] for o in born if not o["split"]]
    if equal:
        lines.append(("not in", f"{', '.join(equal)}: bitwise equal on equal inputs"))
    lines += [("causal", causal_text(causal)) for causal in live["causal"]]
    lines += [
        ("patch", f"{p['name']} ({p['part']}, {p['sites']} sites) closes {p['closed']:.1%}")
        for causal in live["causal"]
        for p in causal.get("patches", [])
    ]
    lines += [("routing", routing["text"]) for routing in live["routing"]]
    return lines


def noise(legs: list[dict[str, Any]]) -> str:
    """Each engine against itself: the worst leg, or exactly zero."""
    worst: dict[str, dict[str, Any]] = {}
    for leg in legs:
        if leg["status"] == "measured":
            old = worst.get(leg["engine"])
            if old is None or leg["mean_abs"] > old["mean_abs"]:
                worst[leg["engine"]] = leg
    texts = []
    for engine, leg in worst.items():
        count = sum(1 for one in legs if one["engine"] == engine and one["status"] == "measured")
        if leg["mean_abs"] == 0.0:
            texts.append(f"{engine} 0 in all {count} legs")
        else:
            texts.append(f"{engine} {number(leg['mean_abs'])} ({leg['leg']}, {leg['code']})")
    return "; ".join(texts) or "not measured"


def local_by_op(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Local errors of a pair by op class: sites, how many split, the largest error, worst site."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["op"], []).append(row)
    result = []
    for op, found in groups.items():
        worst = max(found, key=lambda row: row["error_local"])
        result.append(
            {
                "op": op,
                "sites": len(found),
                "split": sum(row["bitwise_local"] < 1.0 or row["error_local"] > 0 for row in found),
                "error": worst["error_local"],
                "site": f"{worst['site']}:{worst['kind']}",
                "bitwise": min(row["bitwise_local"] for row in found),
            }
        )
    return sorted(result, key=lambda group: -group["error"])


def causal_text(causal: dict[str, Any]) -> str:
    """Verdict of the causal shares, with the largest of them."""
    shares = sorted(causal["ops"], key=lambda share: -share["closed"])[:3]
    shown = ", ".join(f"{share['name']} {share['closed']:.0%}" for share in shares)
    text = f"{causal['verdict']}; share of the gap that correcting one op closes: {shown}"
    if causal["smallest"]:
        text += f"; {_smallest(causal['smallest'])}"
    return f"{text}. {causal['reason']}" if causal["reason"] else text


def _smallest(found: dict[str, Any]) -> str:
    """The fewest op classes, and the fewest layers, that were measured to be enough."""
    told = []
    for group, before in (("ops", ""), ("layers", "layers ")):
        if found[group]:
            closed = found.get(f"closed_{group}") or found["closed"]
            verb = "close" if len(found[group]) > 1 or group == "layers" else "closes"
            told.append(f"{before}{', '.join(found[group])} {verb} {closed:.0%}")
    return "; ".join(told)


def rung_cells(rung: dict[str, Any]) -> list[str]:
    """Gap of both modes, share closed, equal tensors, time and memory against the first run.

    Memory is the GPU's where one was used, else the process's.
    """
    modes, sites = rung["logprob"] or {}, rung["sites"]
    gaps = [number((modes.get(mode) or {}).get("mean_abs")) for mode in ("sample", "score")]
    closed = rung["closed"]["sample"] if modes.get("sample") else rung["closed"]["score"]
    times = [p["time_ratio"] for p in rung["price"]]
    memory = [p.get("peak_gpu_ratio") or p["peak_rss_ratio"] for p in rung["price"]]
    return [
        *gaps,
        "-" if closed is None else f"{closed:.1%}",
        f"{sites['bitwise_equal']}/{sites['compared']}" if sites else "-",
        _ratios(times),
        _ratios(memory),
    ]


def _ratios(values: list[float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.2f}" for value in values)


BOTH: Final = "learner and sampler"


def rung_changes(rung: dict[str, Any]) -> list[str]:
    """Side, what changed there, dgrad and wgrad, and the ops that are ours in each engine."""
    sides = " and ".join(rung.get("sides") or []) or "-"
    backward = rung.get("backward") or "-"
    return [sides, "; ".join(rung.get("changes") or []) or rung["what"], backward, ours(rung)]


def op_counts(rung: dict[str, Any], status: str) -> str:
    """How many ops of each engine have a status, learner first."""
    return "/".join(str(len(side.get(status, []))) for side in rung["ops"])


def ours(rung: dict[str, Any]) -> str:
    """The ops of the rung's engines that are ours, by engine where the engines differ."""
    found = {side["engine"]: ", ".join(side.get("replaced", [])) for side in rung["ops"]}
    if len(set(found.values())) <= 1:
        return next(iter(found.values()), "") or "none"
    return "; ".join(f"{engine}: {ops or 'none'}" for engine, ops in found.items())


def last_native(ladder: list[dict[str, Any]]) -> str:
    """The last rung that puts no op of ours into the engines, and what the end of the ladder is."""
    first = next((i for i, rung in enumerate(ladder) if rung["kernels"]), len(ladder))
    settings = ladder[first - 1]
    gap = (settings["logprob"] or {}).get("score") or {}
    end = ladder[-1]
    equal = end["sites"] and end["sites"]["compared"] == end["sites"]["bitwise_equal"]
    reached = "bitwise equal at every compared tensor" if equal else "not bitwise equal"
    stand_ins = ours(ladder[0])
    note = "" if stand_ins == "none" else f"; ours in every rung: {stand_ins}"
    return (
        f"settings only, engines' own ops: {settings['rung']} "
        f"(score |dlogp| {number(gap.get('mean_abs'))}); end: {end['rung']}, {reached}{note}"
    )


def left_out(row: dict[str, Any]) -> str:
    """What came back without one alignment, and whether the causes say which one it was."""
    gap = ((row["logprob"] or {}).get("score") or {}).get("mean_abs")
    if row["attributed"] is None:
        return f"nothing comes back (score |dlogp| {number(gap)})"
    codes = ", ".join(dict.fromkeys(cause["code"] for cause in row["causes"]))
    first = row["first_divergence"]
    where = f"first split {first['site']}:{first['kind']}; " if first else ""
    named = "named" if row["attributed"] else "NOT named"
    return f"score |dlogp| {number(gap)}; {where}causes {codes}: {named}"


def bare_price(row: dict[str, Any]) -> str:
    """Tokens per second without hooks, against the engine as it is."""
    if row["error"]:
        return f"not measured: {row['error']}"
    return (
        f"{row['tokens_per_second']:.0f} tokens/s, {row['tokens_per_second_before']:.0f} as it is "
        f"({row['speed_ratio']:.2f}x), without hooks"
    )
