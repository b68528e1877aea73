"""Every gate of `isojax verify --arch sm90` on a card, over the small policy or those of ISOJAX_CARD_POLICIES."""

import math

import pytest
import torch
from card_policies import FOLDERS

from bridge.gates import sm90_suite
from bridge.gates.suite import CHECKS


@pytest.fixture(scope="module", params=[None, *FOLDERS], ids=lambda folder: folder.name if folder else "small")
def suite(request):
    made = sm90_suite(request.param)
    made.prepare()
    return made


@pytest.mark.parametrize("name", [name for name, _ in CHECKS])
def test_a_gate_passes(suite, name):
    (gate,) = (gate for gate in suite.gates if gate.name == name)
    print(gate.check())


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"dp": 2}, {"dp": 2, "fsdp": 2}], ids=str)
def test_a_mesh_of_cards_gives_one_cards_bits(mesh):
    if math.prod(mesh.values()) > torch.cuda.device_count():
        pytest.skip(f"{mesh} needs more cards than {torch.cuda.device_count()}")
    suite = sm90_suite(None, mesh)
    suite.prepare()
    assert suite.gates[-1].name == "mesh"
    print(suite.gates[-1].check())
    assert suite.proof().mesh == mesh


def test_the_machine_is_known(suite):
    proof = suite.proof()
    assert proof.ptxas.count(".") == 2
    assert proof.device_kind.startswith("NVIDIA")
