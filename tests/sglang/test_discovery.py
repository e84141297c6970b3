"""How SGLang finds this package and decides what it can do."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys

import pytest
from sglang_support import CALL_SITES, CallSite, binds, need

import hpc


def test_found_without_being_imported(clean_environ: dict[str, str]) -> None:
    """`has_hpc_ops` and the router's gate ask `find_spec` only."""
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('hpc') is not None\n"
        "assert 'hpc' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environ, check=True, timeout=300)
    assert importlib.util.find_spec("hpc") is not None


def test_bf16_decode_has_a_task_map() -> None:
    """`_bf16_decode_supports_task_map`: without it bf16 decode would stay on the static split."""
    assert "task_map" in inspect.signature(hpc.attention_decode_bf16).parameters


@pytest.mark.parametrize("site", CALL_SITES, ids=lambda site: site.function)
def test_calls_bind(site: CallSite) -> None:
    """The arguments of each call fit the signature, which is a plain function's."""
    need(site.function)
    assert inspect.isfunction(getattr(hpc, site.function))
    binds(site)


def test_fuse_moe_is_the_function() -> None:
    """A submodule of that name would shadow it; so it must stay one after everything is loaded."""
    need("fuse_moe")
    for name in hpc.__all__:
        getattr(hpc, name)
    assert callable(hpc.fuse_moe) and inspect.isfunction(hpc.fuse_moe)


def test_query_quantisation_by_value() -> None:
    """The rope call passes this member's value as `quant_policy`."""
    assert hpc.QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR.value == 1


def test_version_is_a_string() -> None:
    assert isinstance(hpc.__version__, str)


def test_hooks_that_would_switch_sglang_over_are_absent() -> None:
    """0.5.23 uses these as soon as they exist; an operator that is not there must not look as if it were."""
    assert not hasattr(hpc.gemm, "gated_mla_gemm")
    for name in ("fuse_ihc_pre", "fuse_ihc_post", "fuse_ihc_post_pre", "fuse_ihc_head"):
        assert getattr(hpc, name, None) is None
