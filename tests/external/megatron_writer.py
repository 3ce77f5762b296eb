"""Writes a trace as a Megatron training run would hold it: shards, interleaves, expert ranges.

Independent of minite_diag.external: every index is worked out here, from what Megatron-Core does.
linear_qkv holds, for each query group, its query heads, its key head and its value head; a
column-parallel weight is cut along dim 0 and a row-parallel one along dim 1; each rank's linear_fc1
holds its share of gate, then its share of up; experts are dealt to the expert-parallel ranks.
"""

import json

import torch
from safetensors.torch import save_file

from minite_diag.canonical.names import STATIC, SequenceKey, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.site import Site

HEADS, GROUPS, HEAD_DIM, EXPERTS, LAYERS = 4, 2, 8, 8, 2


class MegatronWriter:
    """`tensor` ranks share each layer; `data` ranks have a sequence each; experts over all ranks.

    `sequence_parallel` spreads rows over the tensor ranks where Megatron does; `layout` is that of
    the batch, padded to `length`.
    """

    def __init__(self, trace, tokens, *, tensor=1, data=1, layout="packed", length=0, sp=False):
        self.trace, self.tokens = trace, tokens
        self.tensor, self.data, self.sp = tensor, data, sp
        self.layout, self.length = layout, length
        self.world = tensor * data
        self.sites = index_trace(trace)
        self.ranks = [{} for _ in range(self.world)]
        names = list(tokens)
        self.batches = [names] if data == 1 else [[name] for name in names]
        self.swap_kv = False

    # what the trace holds

    def static(self, fqn, kind="weight"):
        return read_site(self.trace, self.sites[STATIC][Site(fqn, kind)]).tensor

    def has(self, fqn, kind):
        key = SequenceKey("score", "", next(iter(self.tokens)))
        return Site(fqn, kind) in self.sites[key]

    def of_sequence(self, name, fqn, kind):
        pieces = self.sites[SequenceKey("score", "", name)].get(Site(fqn, kind))
        return read_site(self.trace, pieces) if pieces else None

    def places(self, batch):
        """Row of each (sequence, position) in a data rank's batch; and its number of rows."""
        if self.layout == "packed":
            starts, total = {}, 0
            for name in batch:
                starts[name] = total
                total += len(self.tokens[name])
            total += -total % self.tensor if self.sp else 0
            return lambda name, position: starts[name] + position, total
        size, order = len(batch), {name: i for i, name in enumerate(batch)}
        if self.layout == "sbh":
            return lambda name, position: position * size + order[name], size * self.length
        return lambda name, position: order[name] * self.length + position, size * self.length

    def batch(self, data_rank, fqn, kind):
        """[rows, ...] of one data rank's batch; padding is NaN or -1, so that it shows if used."""
        batch = self.batches[data_rank]
        place, total = self.places(batch)
        found = [self.of_sequence(name, fqn, kind) for name in batch]
        if any(site is None for site in found):
            return None
        first = found[0].tensor
        fill = float("nan") if first.is_floating_point() else -1
        is_number = found[0].positions is None  # a scale of the whole sequence: one for each row
        shape = () if is_number else first.shape[1:]
        rows = torch.full((total, *shape), 0, dtype=first.dtype)
        if first.element_size() > 1:
            rows.fill_(fill)
        for name, site in zip(batch, found, strict=True):
            positions = range(len(self.tokens[name])) if is_number else site.positions
            index = torch.tensor([place(name, int(p)) for p in positions])
            rows[index] = site.tensor
        return rows

    # what a rank holds

    def rank(self, data_rank, tensor_rank):
        return self.ranks[data_rank * self.tensor + tensor_rank]

    def put(self, data_rank, key, whole, how, parts=None):
        """Cut `whole` for the tensor ranks of one data rank: how is same, rows or a dim."""
        for t in range(self.tensor):
            if how == "same":
                piece = whole
            elif parts is not None:
                piece = parts[t]
            else:
                dim = 0 if how == "rows" else how
                size = whole.shape[dim] // self.tensor
                piece = whole.narrow(dim, t * size, size)
            self.rank(data_rank, t)[key] = piece.contiguous().clone()

    def everywhere(self, key, whole, how, parts=None):
        for d in range(self.data):
            self.put(d, key, whole, how, parts)

    def qkv_order(self, q, k, v):
        """Output features as linear_qkv has them, from dim 0."""
        per_group = HEADS // GROUPS
        pieces = []
        for group in range(GROUPS):
            for head in range(per_group):
                start = (group * per_group + head) * HEAD_DIM
                pieces.append(q[start : start + HEAD_DIM])
            pair = [t[group * HEAD_DIM : (group + 1) * HEAD_DIM] for t in (k, v)]
            pieces += reversed(pair) if self.swap_kv else pair
        return torch.cat(pieces)

    def gate_up_of(self, gate, up, rank, ranks):
        """A rank's gate rows, then its up rows."""
        size = len(gate) // ranks
        own = slice(rank * size, (rank + 1) * size)
        return torch.cat((gate[own], up[own]))

    # the model

    def statics(self):
        self.everywhere("embedding.word_embeddings:weight", self.static("model.embed_tokens"), 0)
        for i in range(LAYERS):
            hf, mg = f"model.layers.{i}", f"decoder.layers.{i}"
            names = [f"{hf}.self_attn.{n}_proj" for n in "qkv"]
            for kind in ("weight", "weight_codes", "weight_block_scale"):
                if Site(names[0], kind) not in self.sites[STATIC]:
                    continue
                whole = self.qkv_order(*(self.static(name, kind) for name in names))
                self.everywhere(f"{mg}.self_attention.linear_qkv:{kind}", whole, 0)
                proj = self.static(f"{hf}.self_attn.o_proj", kind)
                self.everywhere(f"{mg}.self_attention.linear_proj:{kind}", proj, 1)
            kind = "weight_global_decode_scale"
            if Site(names[0], kind) in self.sites[STATIC]:
                for theirs, name in (("qkv", names[0]), ("proj", f"{hf}.self_attn.o_proj")):
                    key = f"{mg}.self_attention.linear_{theirs}:{kind}"
                    self.everywhere(key, self.static(name, kind), "same")
            for theirs, ours in (
                ("input_layernorm", "input_layernorm"),
                ("self_attention.q_layernorm", "self_attn.q_norm"),
                ("self_attention.k_layernorm", "self_attn.k_norm"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
                ("mlp.router", "mlp.gate"),
            ):
                self.everywhere(f"{mg}.{theirs}:weight", self.static(f"{hf}.{ours}"), "same")
            for e in range(EXPERTS):
                expert = f"{hf}.mlp.experts.{e}"
                fc1 = self.gate_up_of(
                    self.static(f"{expert}.gate_proj"), self.static(f"{expert}.up_proj"), 0, 1
                )
                own, local = self.holder(e), self.local_name(mg, e)
                own[f"{local}.linear_fc1:weight"] = fc1
                own[f"{local}.linear_fc2:weight"] = self.static(f"{expert}.down_proj")
        self.everywhere("decoder.final_layernorm:weight", self.static("model.norm"), "same")
        self.everywhere("output_layer:weight", self.static("lm_head"), 0)

    def holder(self, expert):
        return self.ranks[expert // (EXPERTS // self.world)]

    def local_name(self, layer, expert):
        return f"{layer}.mlp.experts.local_experts.{expert % (EXPERTS // self.world)}"

    def call(self, data_rank):
        def put(theirs, ours, kind, how):
            whole = self.batch(data_rank, ours, kind)
            self.put(data_rank, f"step-0/{theirs}:{kind}", whole, how)

        spread = "rows" if self.sp else "same"
        put("embedding.word_embeddings", "model.embed_tokens", "output", spread)
        for i in range(LAYERS):
            hf, mg = f"model.layers.{i}", f"decoder.layers.{i}"
            for kind in ("input", "output"):
                put(f"{mg}.input_layernorm", f"{hf}.input_layernorm", kind, spread)
                put(f"{mg}.self_attention.q_layernorm", f"{hf}.self_attn.q_norm", kind, 1)
                put(f"{mg}.self_attention.k_layernorm", f"{hf}.self_attn.k_norm", kind, 1)
                put(f"{mg}.pre_mlp_layernorm", f"{hf}.post_attention_layernorm", kind, spread)
            put(f"{mg}.self_attention.linear_qkv", f"{hf}.self_attn.q_proj", "input", spread)
            q, k, v = (self.batch(data_rank, f"{hf}.self_attn.{n}_proj", "output").T for n in "qkv")
            fused = self.qkv_order(q, k, v).T
            self.put(data_rank, f"step-0/{mg}.self_attention.linear_qkv:output", fused, 1)
            for name, ours in (
                ("q_rope", "q_rope"),
                ("k_rope", "k_rope"),
                ("core_attention", "attn"),
            ):
                put(f"{mg}.self_attention.{name}", f"{hf}.self_attn.{ours}", "output", 1)
            put(f"{mg}.self_attention.linear_proj", f"{hf}.self_attn.o_proj", "input", 1)
            put(f"{mg}.self_attention.linear_proj", f"{hf}.self_attn.o_proj", "output", spread)
            for theirs, name, how in (("qkv", "q_proj", spread), ("proj", "o_proj", 1)):
                for kind in ("act_codes", "act_block_scale", "act_global_decode_scale"):
                    if self.has(f"{hf}.self_attn.{name}", kind):
                        module = f"{mg}.self_attention.linear_{theirs}"
                        one = kind.endswith("decode_scale")
                        put(module, f"{hf}.self_attn.{name}", kind, "same" if one else how)
            put(f"{mg}.mlp.router", f"{hf}.mlp.gate", "input", spread)
            put(f"{mg}.mlp.router", f"{hf}.mlp.gate", "router_logits", spread)
            for kind in ("input", "output", "topk_ids", "topk_weights"):
                put(f"{mg}.mlp.experts", f"{hf}.mlp.experts", kind, spread)
            put(mg, hf, "output", spread)
        for kind in ("input", "output"):
            put("decoder.final_layernorm", "model.norm", kind, spread)
        put("output_layer", "lm_head", "input", "same" if not self.sp else "rows")
        put("output_layer", "lm_head", "logits", 1)

    def routed(self):
        """An expert's rows, of all data ranks' tokens, in the order in which they were sent."""
        for i in range(LAYERS):
            for e in range(EXPERTS):
                expert = f"model.layers.{i}.mlp.experts.{e}"
                own = self.holder(e)
                local = f"step-0/{self.local_name(f'decoder.layers.{i}', e)}"
                rows, offset = [], 0
                found = {n: [] for n in ("gate_proj", "up_proj", "down_proj", "input", "mid")}
                for d in range(self.data):
                    place, total = self.places(self.batches[d])
                    for name in self.batches[d]:
                        site = self.of_sequence(name, f"{expert}.gate_proj", "input")
                        if site is None:
                            continue
                        rows += [offset + place(name, int(p)) for p in site.positions]
                        found["input"].append(site.tensor)
                        found["mid"].append(
                            self.of_sequence(name, f"{expert}.down_proj", "input").tensor
                        )
                        for part in ("gate_proj", "up_proj", "down_proj"):
                            found[part].append(
                                self.of_sequence(name, f"{expert}.{part}", "output").tensor
                            )
                    offset += total
                if not rows:
                    continue
                shuffle = torch.randperm(len(rows), generator=torch.Generator().manual_seed(e))
                index = torch.tensor(rows, dtype=torch.int32)[shuffle]
                cat = {name: torch.cat(values)[shuffle] for name, values in found.items()}
                own[f"{local}.linear_fc1:rows"] = index
                own[f"{local}.linear_fc1:input"] = cat["input"]
                own[f"{local}.linear_fc1:output"] = torch.cat((cat["gate_proj"], cat["up_proj"]), 1)
                own[f"{local}.linear_fc2:rows"] = index.clone()
                own[f"{local}.linear_fc2:input"] = cat["mid"]
                own[f"{local}.linear_fc2:output"] = cat["down_proj"]

    def manifest(self, modules="megatron"):
        per_rank = EXPERTS // self.world
        ranks = [
            {
                "files": [f"rank-{r}.safetensors"],
                "tensor": r % self.tensor,
                "data": r // self.tensor,
                "experts": [r * per_rank, (r + 1) * per_rank],
            }
            for r in range(self.world)
        ]
        tokens = self.trace.tokens
        logprobs = {
            name: [
                None if value != value else value
                for value in tokens[tokens["probe"] == name].sort_values("position")["logprob"]
            ]
            for name in self.tokens
        }
        spans = [name for batch in self.batches for name in batch]
        call = {"name": "step-0", "sequences": spans, "layout": self.layout}
        if self.layout != "packed":
            call["length"] = self.length
        return {
            "format": "sharded",
            "version": 1,
            "producer": "Megatron-Core, written by a test",
            "dtype": "bfloat16",
            "model": {
                "num_attention_heads": HEADS,
                "num_query_groups": GROUPS,
                "head_dim": HEAD_DIM,
                "num_experts": EXPERTS,
            },
            "ranks": ranks,
            "sequences": [
                {"id": name, "token_ids": ids, "prompt_length": 4, "logprobs": logprobs[name]}
                for name, ids in self.tokens.items()
            ],
            "calls": [call],
            "modules": modules,
        }

    def write(self, folder, modules="megatron"):
        """All ranks' files and the manifest."""
        folder.mkdir(parents=True)
        self.statics()
        for d in range(self.data):
            self.call(d)
        self.routed()
        for r, tensors in enumerate(self.ranks):
            save_file(tensors, folder / f"rank-{r}.safetensors")
        (folder / "manifest.json").write_text(json.dumps(self.manifest(modules)))
        return folder
