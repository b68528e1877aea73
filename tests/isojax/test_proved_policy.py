"""A run on a card that starts from an exported policy: whose kernels are proved, it seals and proves none."""

import dataclasses
import errno
import re
import shutil
from types import SimpleNamespace

import jax
import pytest
from bundle_samples import SHAPES, unlowered
from kernel_samples import sealable_policy, sealed_folder

from contracts import load_contract, save_contract
from contracts.errors import BadBundle, CannotWrite
from isojax.evidence.proof import Proof, write_proof
from isojax.kernels import Bundle, load_kernels
from isojax.kernels.calls import kernel_calls
from isojax.rl import assemble
from isojax.rl.config_file import parse_config
from isojax.weights.load import load
from pallas_kernels import kernel_source

CARD = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="a card")
SETTINGS = {"max_step_tokens": 8, "max_sequences": 4, "max_context": 64}


class _SealedAnewError(Exception):
    """Stands for minutes of sealing and proving."""


@pytest.fixture(autouse=True)
def on_a_card(monkeypatch):
    """No card is needed to decide; whoever seals is stopped."""

    def seal(policy, shapes):
        raise _SealedAnewError

    monkeypatch.setattr(kernel_source, "LOADED", kernel_source.KernelSource())
    monkeypatch.setattr(jax, "devices", lambda: [CARD])
    monkeypatch.setattr(assemble, "engine_class", lambda name: object)
    monkeypatch.setattr(assemble, "seal_for_run", seal)


@pytest.fixture
def policy(tmp_path):
    """An exported policy, unproved, with shapes that a run may ask for."""
    shapes = dataclasses.replace(SHAPES, max_pages=2**20, trainer_tokens=(128, 256))
    calls = kernel_calls(sealable_policy(), shapes)
    programs = tuple(unlowered(call.region, call.types, dict(call.parameters)) for call in calls)
    return sealed_folder(tmp_path / "policy", Bundle(programs, shapes))


def _config(policy, *, tokens=256, temperature=1.0, settings=SETTINGS, mesh=None):
    return parse_config(
        {
            "name": "run",
            "policy": {"source": str(policy)},
            "task": {"source": "function", "prompts": "a:b", "reward": "a:c"},
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 3, "temperature": temperature},
            "optimizer": {"learning_rate": 1e-3},
            "train": {"steps": 1, "micro_batch_tokens": tokens, "mesh": mesh or {}},
            "engine": {"settings": dict(settings)},
        },
        source="test",
    )


def test_a_policy_that_was_proved_on_this_card_is_taken_as_it_is(policy, tmp_path, capsys):
    write_proof(policy, Proof("a card", "13.0.88"))
    started = tmp_path / "run" / "policy"
    assemble._write_policy(_config(policy), tmp_path, started)
    given, taken = (
        {path.relative_to(at): path for path in at.rglob("*") if path.is_file()} for at in (policy, started)
    )
    assert given.keys() == taken.keys()
    assert all(given[name].read_bytes() == taken[name].read_bytes() for name in given)
    load(started, "bfloat16")
    assert capsys.readouterr().err == ""


def test_one_that_was_proved_on_the_runs_mesh_is_taken_for_it_and_for_one_card(policy, tmp_path, capsys):
    write_proof(policy, Proof("a card", "13.0.88", {"dp": 1, "fsdp": 2}))
    for number, mesh in enumerate(({"fsdp": 2}, {})):
        assemble._write_policy(_config(policy, mesh=mesh), tmp_path, tmp_path / str(number))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("proof", "changed", "why"),
    [
        (None, {}, "they are not proved on a card"),
        ("another card", {}, "they are not proved on a card"),
        ("a card", {"temperature": 0.5}, r"their temperature is 1\.0 and the run's 0\.5"),
        ("a card", {"tokens": 512}, "they lack what the run needs of trainer_tokens"),
        ("a card", {"settings": {**SETTINGS, "max_step_tokens": 16}}, "they lack what the run needs of token_buckets"),
        ("a card", {"settings": {**SETTINGS, "max_sequences": 9}}, "of head_rows, max_requests"),
        ("a card", {"mesh": {"dp": 2, "fsdp": 2}}, r"not proved with the run's train\.mesh\.dp and train\.mesh\.fsdp"),
    ],
)
def test_a_policy_that_lacks_something_is_sealed_and_proved_anew_and_it_is_said(
    policy, tmp_path, capsys, proof, changed, why
):
    if proof is not None:
        write_proof(policy, Proof(proof, "13.0.88"))
    with pytest.raises(_SealedAnewError):
        assemble._write_policy(_config(policy, **changed), tmp_path, tmp_path / "run")
    said = capsys.readouterr().err
    assert "others are sealed and proved" in said
    assert re.search(why, said)


def test_a_sources_kernels_are_none_of_the_run_that_seals_its_own(policy, tmp_path):
    """Other code had exported it: kernels of the same calls with other bytes would be refused once they are sealed."""
    with pytest.raises(_SealedAnewError):
        assemble._write_policy(_config(policy), tmp_path, tmp_path / "run")
    sealed_by_the_run = Bundle(
        tuple(
            dataclasses.replace(
                program, modules=tuple(dataclasses.replace(m, module=m.module + b" ") for m in program.modules)
            )
            for program in load_kernels(policy, load_contract(policy)).programs
        ),
        SHAPES,
    )
    kernel_source.LOADED.add(sealed_by_the_run.programs)
    with pytest.raises(BadBundle, match="has loaded other kernels"):
        load(policy, "bfloat16")


def test_a_card_that_is_named_beside_no_proof_is_not_taken(policy, tmp_path, capsys):
    contract = load_contract(policy)
    claims = contract.claims.model_copy(update={"device_kinds": ("a card",)})
    save_contract(contract.replaced(claims=claims), policy)
    with pytest.raises(_SealedAnewError):
        assemble._write_policy(_config(policy), tmp_path, tmp_path / "run")
    assert "they are not proved on a card" in capsys.readouterr().err


def test_damaged_kernels_of_a_proved_policy_are_refused_and_not_replaced(policy, tmp_path):
    write_proof(policy, Proof("a card", "13.0.88"))
    module = next((policy / "kernels" / "modules").iterdir())
    module.write_bytes(module.read_bytes() + b"!")
    with pytest.raises(BadBundle, match=module.name):
        assemble._write_policy(_config(policy), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_inside_its_policy_is_not_copied_into_itself(policy, tmp_path):
    """As where `isojax train` is called in the policy's own folder, with links as a download leaves them."""
    write_proof(policy, Proof("a card", "13.0.88"))
    weights = policy / "model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    (policy / "old" / "checkpoints").mkdir(parents=True)
    started = policy / "runs" / "run" / "policy"
    started.parent.mkdir(parents=True)
    assemble._write_policy(_config(policy), tmp_path, started)
    folders = {path.name for path in policy.iterdir() if path.is_dir()}
    assert folders == {"kernels", "old", "runs"}
    assert {path.name for path in started.iterdir()} == {path.name for path in policy.iterdir()} - {"old", "runs"}
    assert not (started / "model.safetensors").is_symlink()
    assert [path.name for path in started.parent.iterdir()] == ["policy"]
    load(started, "bfloat16")


def test_a_disk_that_refuses_the_copy_leaves_no_half_of_a_policy(policy, tmp_path, monkeypatch):
    write_proof(policy, Proof("a card", "13.0.88"))
    copied = []

    def full(source, target):
        copied.append(source)
        if len(copied) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "run").mkdir()
    with pytest.raises(CannotWrite, match=r"policy: found No space left on device \("):
        assemble._write_policy(_config(policy), tmp_path, tmp_path / "run" / "policy")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_smaller_run_takes_the_larger_policy(policy, tmp_path):
    write_proof(policy, Proof("a card", "13.0.88"))
    smaller = _config(policy, tokens=128, settings={**SETTINGS, "max_sequences": 2, "max_context": 32})
    assemble._write_policy(smaller, tmp_path, tmp_path / "run")
    assert (tmp_path / "run" / "kernels").is_dir()
