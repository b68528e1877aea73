"""A proof is written into a policy folder as a whole, rotates its numerical policy, and binds ptxas and card."""

import json
from dataclasses import replace

import pytest
from kernel_samples import sealed_folder

from contracts import FILE_NAME, load_contract, save_contract
from contracts.errors import BadBundle, BadConfig, MeshNotClaimed, ToolchainMismatch
from isojax.cli.main import main
from isojax.evidence import gates
from isojax.evidence.gates import Gate, GateSuite
from isojax.evidence.proof import Proof, check_ptxas, open_unproved, write_proof
from isojax.kernels import load_kernels
from isojax.weights.load import load_policy

PROOF = Proof("NVIDIA H200", "13.0.88")


def test_a_proved_folder_claims_this_card_and_this_ptxas_and_loads(tmp_path):
    folder = sealed_folder(tmp_path / "policy")
    before = load_contract(folder)
    with pytest.raises(MeshNotClaimed):
        before.check_mesh({"tp": 1})
    proved = write_proof(folder, PROOF)
    assert load_contract(folder) == proved
    assert (proved.claims.state, proved.claims.device_kinds) == ("proved", ("NVIDIA H200",))
    assert proved.toolchain.ptxas == load_kernels(folder, proved).ptxas == "13.0.88"
    assert proved.identities.numerical_policy != before.identities.numerical_policy
    assert proved.identities.semantic == before.identities.semantic
    assert proved.composition == before.composition
    proved.check_mesh({"tp": 1})
    load_policy(folder)
    assert not list(folder.rglob("*.partial"))


def test_another_card_or_ptxas_than_the_proved_ones_is_refused(tmp_path):
    proved = write_proof(sealed_folder(tmp_path / "policy"), PROOF)
    proved.check_device_kind("NVIDIA H200")
    proved.check_toolchain({"ptxas": "13.0.88"})
    with pytest.raises(ToolchainMismatch, match="run `isojax verify`"):
        proved.check_device_kind("NVIDIA H100 80GB HBM3")
    with pytest.raises(ToolchainMismatch, match=r"toolchain\.ptxas"):
        proved.check_toolchain({"ptxas": "13.1.20"})


def test_a_second_kind_of_card_is_added_and_a_second_ptxas_is_refused(tmp_path):
    folder = sealed_folder(tmp_path / "policy")
    first = write_proof(folder, PROOF)
    second = write_proof(folder, Proof("NVIDIA H100 80GB HBM3", "13.0.88"))
    assert second.claims.device_kinds == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert second.identities.numerical_policy == first.identities.numerical_policy
    with pytest.raises(ToolchainMismatch, match=r"toolchain\.ptxas: found 13\.1\.20; allowed: 13\.0\.88"):
        write_proof(folder, Proof("NVIDIA H200", "13.1.20"))
    assert load_contract(folder) == second
    check_ptxas(second, PROOF)


def _degrees(contract):
    return {claim.axis: claim.allowed for claim in contract.claims.topology if claim.kind == "invariant"}


def test_a_proof_of_a_mesh_claims_it_and_its_axes_alone_and_a_later_one_takes_its_place(tmp_path):
    folder = sealed_folder(tmp_path / "policy")
    one = write_proof(folder, PROOF)
    assert _degrees(one) == {}
    both = write_proof(folder, replace(PROOF, mesh={"dp": 2, "fsdp": 4}))
    assert _degrees(both) == {"dp": (1, 2), "fsdp": (1, 4)}
    assert both == load_contract(folder)
    for degrees in ({"dp": 2}, {"fsdp": 4}, {"dp": 2, "fsdp": 4}, {}):
        both.check_mesh(degrees)
    for degrees in ({"dp": 4}, {"fsdp": 2}, {"tp": 2}):
        with pytest.raises(MeshNotClaimed):
            both.check_mesh(degrees)
    # Neither mesh of the two proofs together has run.
    other = write_proof(folder, replace(PROOF, mesh={"dp": 1, "fsdp": 8}))
    assert _degrees(other) == {"fsdp": (1, 8)}
    assert other.identities.numerical_policy != one.identities.numerical_policy
    assert _degrees(write_proof(folder, PROOF)) == {}


def test_of_two_kinds_of_cards_only_what_both_proved_is_claimed(tmp_path):
    folder = sealed_folder(tmp_path / "policy")
    second = Proof("NVIDIA H100 80GB HBM3", "13.0.88", {"dp": 2, "fsdp": 2})
    write_proof(folder, replace(PROOF, mesh={"fsdp": 2}))
    found = write_proof(folder, second)
    assert found.claims.device_kinds == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert _degrees(found) == {"fsdp": (1, 2)}
    assert _degrees(write_proof(folder, PROOF)) == {}
    assert _degrees(write_proof(folder, second)) == {}


def test_a_crash_between_the_two_files_leaves_a_folder_that_is_refused(tmp_path):
    folder = sealed_folder(tmp_path / "policy")
    before = load_contract(folder)
    write_proof(folder, PROOF)
    save_contract(before, folder)
    with pytest.raises(BadBundle, match=r"toolchain\.ptxas"):
        load_policy(folder)


def test_a_cpu_contract_has_nothing_to_prove_on_a_card(tmp_path):
    contract = load_contract(sealed_folder(tmp_path / "policy"))
    entries = tuple(
        entry.model_copy(update={"arch": "cpu-x86_64_avx512", "kernel_digests": {}}) for entry in contract.composition
    )
    toolchain = contract.toolchain.model_copy(update={"module_format": "xla_cpu", "kernel_manifest": None})
    save_contract(contract.replaced(composition=entries, toolchain=toolchain), tmp_path)
    with pytest.raises(BadConfig, match="FOLDER"):
        open_unproved(tmp_path)


def _suite(monkeypatch, *checks):
    table = tuple(Gate(f"gate{number}", "sm90", "A claim.", check) for number, check in enumerate(checks))

    def suites(folder, mesh):
        return [GateSuite("sm90", table, proof=lambda: replace(PROOF, mesh=mesh))]

    monkeypatch.setattr(gates, "open_suites", suites)


def _fails() -> str:
    raise gates.BadConfig(field="rows", found=1, allowed=0, reason="They differ.")


def test_verify_records_a_proof_when_all_gates_pass(tmp_path, monkeypatch, capsys):
    folder = sealed_folder(tmp_path / "policy")
    _suite(monkeypatch, lambda: "4 rows", lambda: "2 rows")
    assert main(["verify", "--arch", "sm90", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["proof"]
    proved = load_contract(folder)
    assert said["numerical_policy"] == proved.identities.numerical_policy
    assert (said["ptxas"], said["device_kinds"]) == ("13.0.88", ["NVIDIA H200"])
    assert main(["verify", "--arch", "sm90", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "proved on NVIDIA H200, ptxas 13.0.88" in said
    assert "not proved here" in said


def test_verify_says_which_meshes_the_contract_claims_now(tmp_path, monkeypatch, capsys):
    folder = sealed_folder(tmp_path / "policy")
    _suite(monkeypatch, lambda: "4 rows")
    verify = ["verify", "--arch", "sm90", str(folder)]
    assert main([*verify, "--mesh", "dp=2,fsdp=4"]) == 0
    assert "claimed of meshes: dp in 1, 2; fsdp in 1, 4\n" in capsys.readouterr().out
    assert main([*verify, "--mesh", "fsdp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["meshes"] == {"fsdp": [1, 2]}
    write_proof(folder, Proof("NVIDIA H100 80GB HBM3", "13.0.88"))
    assert main([*verify, "--mesh", "fsdp=2"]) == 0
    said = capsys.readouterr().out
    assert "claimed of meshes: one card\n" in said
    assert "not claimed: fsdp as asked for, since another kind of card is claimed" in said
    load_contract(folder).check_mesh({})


@pytest.mark.parametrize("mesh", ["foo=2", "dp=0", "dp", "dp=2,dp=2"])
def test_a_mesh_that_is_misread_is_refused_by_name(mesh, capsys):
    assert main(["verify", "--arch", "sm90", "--mesh", mesh]) == 2
    assert "mesh" in capsys.readouterr().err


def test_verify_records_nothing_when_a_gate_fails_or_is_left_out(tmp_path, monkeypatch, capsys):
    folder = sealed_folder(tmp_path / "policy")
    before = (folder / FILE_NAME).read_bytes()
    _suite(monkeypatch, lambda: "4 rows", _fails)
    assert main(["verify", "--arch", "sm90", str(folder)]) == 1
    assert "unchanged, since a gate failed" in capsys.readouterr().out
    assert main(["verify", "--arch", "sm90", str(folder), "--gate", "gate0"]) == 0
    assert "unchanged, since only some gates ran" in capsys.readouterr().out
    assert main(["verify", "--arch", "sm90", str(folder), "--gate", "gate0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"] is None
    assert (folder / FILE_NAME).read_bytes() == before
