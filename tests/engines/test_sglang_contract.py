"""Real SGLang holds what every engine has to hold."""

from minite_diag.testing import EngineContract


class TestSglang(EngineContract):
    engine = "sglang"
