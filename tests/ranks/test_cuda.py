"""CUDA and NCCL: a group of one, since most machines have one device for a test."""

import pytest
import torch
import torch.distributed as dist

import kondo
import kondo.ranks
from ranks.problems import Policy, gradients, problem, wrap
from steps import run_rank_step, run_step
from tolerances import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(params=["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def group(request):
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("unit", ["sample", "sequence", "token"])
@pytest.mark.parametrize("rows_on", ["cuda", "cpu"])
def test_a_step_on_cuda_is_that_of_one_process(group, unit, rows_on):
    every = problem(unit, (40,))
    batch = {name: values.to(rows_on) for name, values in every.batch.items()}
    model, alone = Policy(unit).cuda(), Policy(unit).cuda()

    def on_cuda(policy):
        return lambda rows: policy({name: values.cuda() for name, values in rows.items()})

    options = {"mask": every.mask, "unit": unit, "micro_batch": 3}
    gate = {"rate": 0.2, "temperature": 0.1}
    draws = [torch.Generator("cpu").manual_seed(0) for _ in range(2)]
    run_step(
        on_cuda(alone),
        batch,
        every.advantages,
        gate=kondo.Gate(**gate),
        generator=draws[0],
        **options,
    )
    report = run_rank_step(
        on_cuda(model),
        batch,
        every.advantages,
        gate=kondo.Gate(**gate),
        generator=draws[1],
        group=group,
        module=model,
        all_reduce=True,
        **options,
    )
    assert report.kept > 0
    for name, grad in gradients(alone).items():
        assert_close(gradients(model)[name], grad)


def test_wrapped_modules_work_on_cuda(group):
    every = problem("sample", (40,))
    batch = {name: values.cuda() for name, values in every.batch.items()}
    model = wrap(Policy("sample").cuda(), group, "ddp")
    report = run_rank_step(
        model, batch, every.advantages, gate=kondo.Gate(rate=0.2), group=group, mask=every.mask
    )
    assert report.calls == 1
    assert all(grad.is_cuda for grad in gradients(model).values())
