import pytest

from minite_diag.errors import UsageError
from minite_diag.site import KINDS, Site, matches


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    site = Site("model.layers.3.mlp.experts.17.up_proj", kind)
    assert Site.parse(str(site)) == site
    assert (site.layer_index, site.expert_index) == (3, 17)


def test_outside_of_layers() -> None:
    assert Site("lm_head", "logits").layer_index is None
    assert Site("model.layers.0.mlp.experts", "topk_ids").expert_index is None


@pytest.mark.parametrize("text", ["lm_head", ":output", "lm_head:outptu"])
def test_bad_sites_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        Site.parse(text)


def test_globs_select_names_and_kinds() -> None:
    assert matches("model.layers.0.mlp.up_proj", "output", ["*.layers.0.*"])
    assert matches("model.layers.0.mlp.up_proj", "output", ["lm_head", "*:out*"])
    assert not matches("model.layers.0.mlp.up_proj", "input", ["*.layers.0.*:output"])
    assert not matches("model.layers.0.mlp.up_proj", "input", [])
