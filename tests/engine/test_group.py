"""Who makes a step together: what is taken for a group, and groups of somebody else."""

import inspect

import pytest
import torch
import torch.distributed as dist

import kondo
from kondo.engine.step import LocalGroup, group_of
from kondo.ranks.rank_group import RankGroup
from steps import run_step
from tolerances import assert_close

STATES = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
ADVANTAGES = torch.randn(20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("given", [None, "local"])
def test_one_process_is_alone(given):
    assert isinstance(group_of(given), LocalGroup)


def test_a_group_stays_itself():
    alone = LocalGroup()
    assert group_of(alone) is alone


@pytest.mark.parametrize("given", ["everyone", "World", ""])
def test_other_words_are_refused(given):
    with pytest.raises(ValueError, match=f'group must be "world", "local", .* got {given!r}'):
        group_of(given)


@pytest.mark.parametrize("given", [3, torch.ones(2), object()], ids=["int", "tensor", "object"])
def test_what_is_no_group_is_refused(given):
    with pytest.raises(ValueError, match="group must be "):
        group_of(given)


def test_several_processes_need_a_word(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match=r'several processes, 4 here, got None; give "world"'):
        group_of(None)
    assert isinstance(group_of("local"), LocalGroup)


MEMBERS = [name for name in vars(kondo.Group) if not name.startswith("_")]
MEMBERS += [name for name in kondo.Group.__annotations__ if name not in MEMBERS]


@pytest.mark.parametrize("kind", [LocalGroup, RankGroup])
def test_both_kinds_have_every_member_and_the_same_arguments(kind):
    assert not issubclass(RankGroup, LocalGroup)
    for name in MEMBERS:
        assert hasattr(kind, name) or name in inspect.getsource(kind), name
        wanted = getattr(kondo.Group, name, None)
        if inspect.isfunction(wanted):
            found = inspect.signature(getattr(kind, name)).parameters
            assert list(found) == list(inspect.signature(wanted).parameters), name


class Own:
    """A group of somebody else: the members of the protocol, and nothing more."""

    def __init__(self):
        self.calls = []
        self._alone = LocalGroup()

    def __getattr__(self, name):
        if name not in MEMBERS:
            raise AttributeError(name)
        member = getattr(self._alone, name)
        if not callable(member):
            return member

        def noted(*arguments):
            self.calls.append(name)
            return member(*arguments)

        return noted


def test_a_group_of_somebody_else_makes_the_step():
    weight = torch.ones(3, requires_grad=True)

    def log_prob(rows):
        return -(rows * weight).sum(1).square()

    for options in ({}, {"screen_rows": "promising"}):
        given = options | {"gate": kondo.Gate(rate=0.25)}
        alone = run_step(log_prob, STATES, ADVANTAGES, **given)
        expected, weight.grad, group = weight.grad, None, Own()
        report = run_step(log_prob, STATES, ADVANTAGES, group=group, **given)
        assert_close(weight.grad, expected)
        assert report.as_dict().keys() == alone.as_dict().keys()
        assert (report.kept, report.rows_screened) == (alone.kept, alone.rows_screened)
        order = [name for name in dict.fromkeys(group.calls) if name != "total"]
        assert order == ["together", "agree", "forwards", "choose", "train", "report"]
        weight.grad = None
    kondo.check(log_prob, STATES, ADVANTAGES, group=Own())
