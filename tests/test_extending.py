"""What docs/extending.md says is so: its changes are applied to a copy of the tree, which then runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/extending.md"
#: Folders whose Python files people edit to extend the product.
PRODUCT = (
    "cluster",
    "decode_worker",
    "engine",
    "kv_transfer",
    "prefill_worker",
    "protos",
    "router",
)


# ---- the page's changes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Adjacent lines of one file, before and after."""

    path: str
    before: str
    after: str


def changes_of(section: str) -> list[Change]:
    """The changes in the diffs of a section of the page, in their order."""
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    assert text, f"the page has no section {section!r}"
    changes: list[Change] = []
    for block in re.findall(r"^   ```diff\n(.*?)^   ```$", text, re.DOTALL | re.MULTILINE):
        lines = [line.removeprefix("   ") for line in block.splitlines()]
        path = lines[0].removeprefix("--- ")
        for hunk in "\n".join(lines[1:]).split("\n@@\n"):
            hunk_lines = hunk.split("\n")
            before = [line[1:] for line in hunk_lines if line[:1] != "+"]
            after = [line[1:] for line in hunk_lines if line[:1] != "-"]
            changes.append(Change(path, "\n".join(before), "\n".join(after)))
    return changes


def extended_tree(folder: Path, changes: list[Change]) -> Path:
    """A copy of the product with the changes; all other files are links. Returns its parent."""
    texts: dict[str, str] = {}
    for change in changes:
        text = texts.get(change.path) or (ROOT / change.path).read_text()
        assert text.count(change.before) == 1, f"{change.path} has not once:\n{change.before}"
        texts[change.path] = text.replace(change.before, change.after)
    for name in PRODUCT:
        for directory, directories, files in os.walk(ROOT / name):
            directories[:] = [name for name in directories if name != "__pycache__"]
            relative = Path(directory).relative_to(ROOT)
            (folder / "diptych" / relative).mkdir(parents=True)
            for file in files:
                path = relative / file
                if str(path) in texts:
                    (folder / "diptych" / path).write_text(texts[str(path)])
                else:
                    (folder / "diptych" / path).symlink_to(ROOT / path)
    return folder


def run_in(parent: Path, script: str, *arguments: Path) -> None:
    """Runs the script with the changed tree as `diptych`, and this tree's tests."""
    (parent / "tests").symlink_to(ROOT / "tests")
    check = (
        "import diptych.protos.frames\n"
        f"assert diptych.protos.frames.__file__.startswith({str(parent)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check + script, *map(str, arguments)],
        cwd=parent,
        env={**os.environ, "PYTHONPATH": str(parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- a sampling parameter ------------------------------------------------------------------------

SAMPLING = """
import msgspec, numpy as np, torch
from diptych.cluster.gateway.apis.parameters import ModelLimits, SamplingParameters, sampling_of
from diptych.cluster.gateway.apis.schema import parse_body
from diptych.engine.gpu.slots import device_can_sample
from diptych.engine.sampler import sample_tokens
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Sampling

limits = ModelLimits(max_model_len=100, stop_ids=(1,), temperature=1.0)
body = parse_body(SamplingParameters, b'{"top_a": 0.5, "seed": 3}')
sampling = sampling_of(body, "request", 10, limits)
sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling)
assert sent.top_a == 0.5

logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
shares = torch.softmax(logits[0], dim=0).numpy()
allowed = set(np.flatnonzero(shares >= 0.5 * shares.max() ** 2).tolist())
assert 1 < len(allowed) < 4

def drawn(top_a):
    ids = set()
    for seed in range(200):
        sampling = Sampling(4, temperature=1.0, seed=seed, top_a=top_a)
        sequence = Sequence(("a", 0), [2, 3], 2, sampling)
        assert device_can_sample(sequence) == (top_a == 0), "a GPU would skip it"
        ids.add(sample_tokens(logits, [sequence])[0].id)
    return ids

assert drawn(0.0) == {0, 1, 2, 3}
assert drawn(0.5) == allowed
"""


@pytest.mark.slow
def test_the_pages_sampling_parameter_works(tmp_path: Path) -> None:
    changes = changes_of("Add a sampling parameter")
    assert len({change.path for change in changes}) == 3
    run_in(extended_tree(tmp_path, changes), SAMPLING)


@pytest.mark.parametrize(
    "name", ["min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_a_sampling_parameter_is_named_in_three_files_a_gpus_and_grpcs(name: str) -> None:
    # a GPU's sampler may know it too, and the page says what follows if it does not
    beside = {
        path for path in files_that_name(name) if path.startswith(("engine/gpu/", "engine/bench/"))
    }
    assert "engine/gpu/slots.py" in beside
    assert files_that_name(name) - beside == {
        "protos/frames.py",
        "cluster/gateway/apis/parameters.py",
        "engine/sampler.py",
        "protos/inference.proto",
    }


def files_that_name(name: str) -> set[str]:
    """Product files in which `name` is a word."""
    word = re.compile(rf"\b{name}\b")
    paths = [
        path
        for folder in PRODUCT
        for suffix in ("*.py", "*.proto")
        for path in (ROOT / folder).rglob(suffix)
        if "_pb2" not in path.name
    ]
    return {str(path.relative_to(ROOT)) for path in paths if word.search(path.read_text())}


def test_a_parameter_that_no_set_names_is_never_skipped() -> None:
    """The greedy short cut and a GPU's sampler ask `keeps_logits`, which knows all parameters."""
    from diptych.engine.sampler import ADJUSTING, CUTTING, ORDER_KEEPING
    from diptych.protos.frames import Sampling

    assert set(CUTTING) < ORDER_KEEPING
    assert {*ADJUSTING, *ORDER_KEEPING} == set(Sampling.__struct_fields__)


# ---- an engine option ----------------------------------------------------------------------------

OPTION = """
import json, sys
from pathlib import Path
from diptych.cluster.config import ClusterConfig, ConfigError, load_config
from diptych.cluster.worker.core import engine_config
from diptych.engine.engine import Engine
from diptych.engine.sequence import Sequence
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling

folder = Path(sys.argv[1])
assert "demotion_limit" in json.dumps(ClusterConfig.model_json_schema())
key = "pools.decode.engine.demotion_limit"
try:
    load_config(None, {key: 0})
except ConfigError as error:
    assert f"{key}: input should be greater than or equal to 1 (got 0)" in str(error)
else:
    raise AssertionError("its bounds do not hold")

def pinned(overrides):
    config = load_config(None, {"pools.decode.engine.kv_mib": 8, **overrides})
    options = engine_config(config, config.pools.decode, folder)
    engine = Engine(options)
    engine.count_tier_blocks = lambda hashes: 0
    for number in range(200):
        ids = [(number * 7919 + i * 31) % 250 + 3 for i in range(600)]
        sequence = Sequence((str(number), 0), ids, 600, Sampling(1), block_hashes(ids, b""))
        engine.add(sequence)
        while engine.step() or not engine.idle():
            pass
        blocks = engine.pin_for_demotion()
        if blocks:
            return options.limits.demotion_limit, len(blocks)

default, usual_count = pinned({})
assert default == 16 and usual_count > 2
assert pinned({key: 2}) == (2, 2)
"""


@pytest.mark.slow
def test_the_pages_engine_option_works(tmp_path: Path) -> None:
    from .support.checkpoints import make

    changes = changes_of("Add an engine option")
    assert {change.path for change in changes} == {"engine/options.py", "engine/engine.py"}
    folder = make(tmp_path / "llama", "llama")
    run_in(extended_tree(tmp_path / "tree", changes), OPTION, folder)


# ---- a model -------------------------------------------------------------------------------------

MODEL = """
import sys
from pathlib import Path
from tests.engine.rig import alone, engine, prompt
from tests.engine.test_golden import WHOLE, check
from diptych.engine.errors import UnsupportedModel
from diptych.engine.spec import read_spec

folder, biased_folder = map(Path, sys.argv[1:])
assert read_spec(folder).architecture == "seed_oss"
owner, ids = engine(folder, "float32", max_step_tokens=128), prompt(100, 2)
check(folder, ids, alone(owner, ids, WHOLE))
try:
    read_spec(biased_folder)
except UnsupportedModel as error:
    assert "attention_out_bias True" in str(error)
else:
    raise AssertionError("a bias would be ignored")
"""


@pytest.mark.slow
def test_the_pages_model_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    changes = changes_of("Add a Llama-like model")
    assert {change.path for change in changes} == {"engine/spec.py"}
    folder = seed_oss_checkpoint(tmp_path / "model", attention_out_bias=False)
    biased_folder = seed_oss_checkpoint(tmp_path / "biased", attention_out_bias=True)
    run_in(extended_tree(tmp_path / "tree", changes), MODEL, folder, biased_folder)


def seed_oss_checkpoint(folder: Path, *, attention_out_bias: bool) -> Path:
    """A tiny random checkpoint: Qwen2's weights have the names and biases of Seed-OSS's."""
    import json

    from .support.checkpoints import make

    make(folder, "qwen2", head_dim=32, attention_bias=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": attention_out_bias,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_names_files_and_names_that_are_there() -> None:
    text = PAGE.read_text()
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]+)`", text)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_the_table_has_as_many_files_as_the_changes_touch() -> None:
    table = PAGE.read_text().partition("| to add |")[2].partition("\n\n")[0]
    for row, section in [
        ("a sampling parameter", "Add a sampling parameter"),
        ("an engine option", "Add an engine option"),
        ("a Llama-like model", "Add a Llama-like model"),
    ]:
        count = int(re.search(rf"\| {row} \| (\d)", table)[1])
        assert count == len({change.path for change in changes_of(section)})
