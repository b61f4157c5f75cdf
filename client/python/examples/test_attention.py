import pytest
from cppool import suite


@pytest.mark.parametrize("cell", suite("smoke"))
def test_attention(cppool, cell):
    cppool.run(cell)


@pytest.mark.cppool(world_size=4)
def test_my_problem(cppool):
    result = cppool.run({"cp_comm_type": "a2a+p2p", "num_heads": 8, "num_gqa_groups": 2})
    assert result.tflops["forward"] > 0
