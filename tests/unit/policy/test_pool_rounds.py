"""A pool's tick as a whole, with more than one transition under way, a memory of moves, and GPUs that are not read."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_engine.core.pool.decide import UnderWay, decide_pool, settle
from policy_engine.core.shared.vocabulary import ClampKind, DecisionKind, MemberKey, Rule
from tests.unit.policy.initial_layouts import born, facts
from trimtab.config.poolrules import PoolRules
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle, Role

START_S = 1_700_000_000.0


def policy(name, *, gpus=1, floor=1, **share):
    return ServicePolicy.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": 0.05},
                "roles": [{"role": "colocated", "minReplicas": floor, "maxReplicas": 64, "gpusPerReplica": gpus}],
                "tokenServiceShare": {"thetaTps": 20, **share},
                "guards": {"ttftP95S": {"hard": 5}},
            },
        }
    )


def window(*, decode, running, waiting=0.0, end_s=START_S, **more):
    values = {"prefill_tps": 0.0, "decode_tps": decode, "request_rps": 0.0, "running": running, "waiting": waiting}
    signals = {name: ok(value) for name, value in {**values, **more}.items()}
    return RoleSignals(role=Role.COLOCATED, window_end_s=end_s, **signals)


STARVING = {"decode": 30.0, "running": 40.0, "waiting": 30.0}
QUIET = {"decode": 0.0, "running": 0.0}


def key(name):
    return MemberKey(name, Role.COLOCATED)


def tick_of(counts, loads, *, nodes=1, floor=1, big=1, **rules):
    """`counts` awake on nodes of eight GPUs each, `loads` in their windows; the service `big` has larger replicas."""
    pool = Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": f"n{index}", "gpuIndices": list(range(8))} for index in range(nodes)],
                "members": [{"service": name, "initialAwake": count} for name, count in counts.items()],
                "rules": rules,
            },
        }
    )
    policies = tuple(policy(name, gpus=big if name == "big" else 1, floor=floor) for name in counts)
    return born(
        pool,
        policies,
        now_s=START_S,
        views={key(name): window(**load) for name, load in loads.items()},
        fronts={name: FrontDoor(START_S, held=ok(0.0)) for name in loads},
    )


def taken(given, result, operation):
    """The next turn's input: `result` was published, and the actuator works on it; nothing has moved yet."""
    transition = result.draft.transition
    changes = (*transition.releases, *transition.wakes)
    under = UnderWay(
        operation,
        result.draft.rule,
        tuple(sorted({key(item.service) for item in transition.wakes})),
        tuple(sorted({key(item.service) for item in transition.releases})),
        tuple(sorted(item.replica for item in changes)),
    )
    return replace(
        given,
        now_s=given.now_s + 0.2,
        awake=result.awake,
        state=result.state,
        operations=(*given.operations, under),
        busy=tuple(sorted({*given.busy, *under.replicas})),
    )


def services(result):
    transition = result.draft.transition
    return {item.service for item in (*transition.releases, *transition.wakes)}


EIGHT = {"chat": 1, "code": 3, "math": 3, "text": 1}
LOADS = {"chat": STARVING, "code": QUIET, "math": QUIET, "text": STARVING}


def test_a_round_goes_on_with_disjoint_services_and_then_waits():
    given = tick_of(EIGHT, LOADS, maxTransitions=3)
    first = decide_pool(given)
    second_turn = taken(given, first, "op-1")
    second = decide_pool(second_turn)
    assert services(first).isdisjoint(services(second))
    assert services(first) | services(second) == set(EIGHT)
    third = decide_pool(taken(second_turn, second, "op-2"))
    assert third.draft is None
    assert third.state.round == ()


def test_within_a_round_a_service_moves_once_even_when_its_transition_has_ended():
    given = tick_of({"chat": 1, "code": 7}, {"chat": STARVING, "code": QUIET}, maxTransitions=3)
    first = decide_pool(given)
    assert first.draft is not None
    ended = replace(taken(given, first, "op-1"), operations=(), busy=(), replicas=facts(given.overlay, first.awake))
    assert decide_pool(ended).draft is None
    seen = tuple((name, replace(view, window_end_s=START_S + 5)) for name, view in given.views)
    later = replace(ended, now_s=START_S + 5, views=seen)
    assert decide_pool(later).draft is not None


def test_a_full_pool_of_transitions_waits_and_says_for_which():
    given = tick_of(EIGHT, LOADS, maxTransitions=2)
    first = decide_pool(given)
    one = taken(given, first, "op-1")
    second = decide_pool(one)
    both = taken(one, second, "op-2")
    result = decide_pool(replace(both, now_s=START_S + 60))
    assert result.draft is None
    assert result.holding == "operation op-1, op-2 is under way"


@pytest.mark.parametrize(("nodes", "limit"), [(1, 1), (7, 1), (8, 2), (12, 3)])
def test_a_pool_may_have_one_transition_under_way_per_32_gpus(nodes, limit):
    """Ten services, of which five starve and five rest."""
    counts = {f"s{index}": 1 if index < 5 or nodes == 1 else 2 for index in range(8 if nodes == 1 else 10)}
    loads = {name: STARVING if index < 5 else QUIET for index, name in enumerate(counts)}
    turn = tick_of(counts, loads, nodes=nodes, floor=0)
    made = 0
    while made < 9:
        result = decide_pool(turn)
        if result.draft is None or result.draft.transition is None:
            break
        made += 1
        turn = taken(turn, result, f"op-{made}")
    assert made == limit


def test_gpus_of_a_transition_under_way_are_left_alone():
    """GPU 1 is free once `big` sleeps, and `text` starves; but if `chat` fails to wake, `big` needs it again."""
    loads = {"big": QUIET, "chat": STARVING, "text": STARVING}
    given = tick_of({"big": 1, "chat": 1, "text": 5}, loads, big=2, floor=0)
    awake = tuple(sorted({*given.awake, "chat-n0-0"} - {"big-n0-0"}))
    moved = ("big-n0-0", "chat-n0-0")
    under = UnderWay("op-1", Rule.RESCUE_CRITICAL, (key("chat"),), (key("big"),), moved)
    asleep = replace(given, awake=awake, replicas=facts(given.overlay, set(awake) - {"chat-n0-0"}))
    free = decide_pool(asleep)
    assert [item.replica for item in free.draft.transition.wakes] == ["chat-n0-1"]
    rules = {"rules": PoolRules(max_transitions=2)}
    two = given.pool.model_copy(update={"spec": given.pool.spec.model_copy(update=rules)})
    result = decide_pool(replace(asleep, pool=two, operations=(under,)))
    assert result.draft is None or result.draft.transition is None


def test_a_transition_of_which_nothing_is_known_bars_all():
    given = replace(tick_of(EIGHT, LOADS, maxTransitions=3), operations=(UnderWay("of d-1", None, (), (), ()),))
    assert decide_pool(given).holding == "operation of d-1 is under way"
    untold = UnderWay("op-9", Rule.REBALANCE, (key("chat"),), (), ())
    assert decide_pool(replace(given, operations=(untold,))).holding == "operation op-9 is under way"


@pytest.mark.parametrize("rule", [Rule.REBALANCE, Rule.LEVEL_LOAD, Rule.LEVEL_LATENCY])
def test_only_a_voluntary_move_gives_way_to_a_hard_guard(rule):
    hurt = {**STARVING, "ttft_p95_s": 9.0}
    given = tick_of(EIGHT, {**LOADS, "text": hurt}, maxTransitions=2)
    rescue = UnderWay("op-1", Rule.RESCUE_CRITICAL, (key("chat"),), (key("code"),), ("chat-n0-1",))
    move = UnderWay("op-2", rule, (key("code"),), (key("math"),), ("math-n0-4",))
    result = decide_pool(replace(given, operations=(rescue, move)))
    assert result.preempt_operation == "op-2"
    assert result.preempt.startswith("text: TTFT p95 9 s")
    spared = decide_pool(replace(given, operations=(rescue, replace(move, receivers=(key("text"),)))))
    assert spared.preempt == ""
    gift = replace(move, rule=Rule.IDLE_GPU, donors=())
    assert decide_pool(replace(given, operations=(rescue, gift))).preempt == ""


def test_a_move_is_remembered_from_its_end():
    given = tick_of(EIGHT, LOADS, maxTransitions=1)
    first = decide_pool(given)
    running = replace(taken(given, first, "op-1"), now_s=START_S + 8)
    state = decide_pool(running).state
    ends = {item.key.service: item.moved_at_s for item in state.members if item.moved_at_s is not None}
    assert ends == dict.fromkeys(services(first), START_S + 8)
    receiver = first.draft.transition.wakes[0].service
    assert state.memory(key(receiver)).received_at_s == START_S
    assert state.memory(key(receiver)).elasticity.before_replicas == 1


def test_a_move_that_was_taken_back_is_none():
    """A failed transition must not make its receiver wait until its window has seen what never happened."""
    given = tick_of(EIGHT, LOADS, maxTransitions=1)
    first = decide_pool(given)
    working = decide_pool(replace(taken(given, first, "op-1"), now_s=START_S + 3))
    calm = tuple((name, window(**QUIET)) for name, _ in given.views)
    back = replace(given, now_s=START_S + 4, state=working.state, views=calm)
    assert {item.moved_at_s for item in decide_pool(back).state.members} == {None}
    done = replace(back, awake=first.awake, replicas=facts(given.overlay, first.awake))
    moved = {item.key.service for item in decide_pool(done).state.members if item.moved_at_s == START_S + 3}
    assert moved == services(first)


@pytest.mark.parametrize("life_cycle", [LifeCycle.UNKNOWN, None])
def test_a_node_that_cannot_be_read_closes_the_pool(life_cycle):
    given = tick_of({"chat": 1, "code": 15}, {"chat": STARVING, "code": QUIET}, nodes=2)
    there = tuple(item for item in given.replicas if "-n1-" not in item.replica)
    lost = tuple(item for item in given.replicas if "-n1-" in item.replica)
    if life_cycle is None:
        dark = there
    else:
        dark = (*there, *(replace(item, life_cycle=life_cycle, routable=False) for item in lost))
    result = decide_pool(replace(given, replicas=dark))
    assert result.awake == given.awake
    assert result.draft.kind == DecisionKind.HOLD
    assert [item.kind for item in result.draft.clamps] == [ClampKind.BUDGET_UNKNOWN]
    assert result.holding == "BudgetUnknown: none of the 16 replicas on the 8 GPUs of n1 can be read"
    again = decide_pool(replace(given, replicas=dark, state=result.state, now_s=START_S + 1))
    assert again.draft is None, "told already"
    one_is_read = tuple(item for item in dark if item.replica != lost[0].replica) + lost[:1]
    assert decide_pool(replace(given, replicas=one_is_read)).draft.kind == DecisionKind.TRANSITION


def test_what_the_shell_knows_of_the_budget_counts_too():
    given = replace(tick_of(EIGHT, LOADS), budget_unknown="node n0 left the inventory")
    assert decide_pool(given).holding == "BudgetUnknown: node n0 left the inventory"


def test_load_is_part_of_the_record_and_of_the_report():
    given = tick_of(EIGHT, LOADS)
    told = policy("chat", capacityPrefillTps=8000, capacityDecodeTps=2000)
    front = FrontDoor(START_S, ok(0.0), ok(4.0), arrival_prompt_tps=ok(4000.0), arrival_output_tps=ok(8000.0))
    given = replace(
        given,
        policies=(told, *given.policies[1:]),
        fronts=tuple((name, front if name == "chat" else door) for name, door in given.fronts),
    )
    result = decide_pool(given)
    reports = {item.key.service: item for item in result.reports}
    assert reports["chat"].load.arriving == pytest.approx(4.5)
    assert reports["code"].load is None
    inputs = {item.name: item.signal.value for item in result.draft.inputs}
    assert inputs["chat arriving work"] == pytest.approx(4.5)
    assert "code arriving work" not in inputs
    known = reports["chat"].load
    assert inputs["chat change of work to come"] == known.rise
    assert inputs["chat usual work"] == known.usual
    assert inputs["chat usual requests"] == pytest.approx(4.0)
    assert inputs["chat usual latency"] == pytest.approx(known.requests / 4.0), "what a move for latency goes by"


class SlowActuator:
    """Carries transitions out in steps: donors sleep, receivers wake; or it all goes back."""

    def __init__(self, given):
        self.gpus = {item.replica: item.gpus for item in given.overlay}
        self.awake = set(given.awake)
        self.operations = {}

    def check(self, budget):
        used = [gpu for name in self.awake for gpu in self.gpus[name]]
        assert len(set(used)) == len(used) <= budget, "two awake replicas on one GPU"

    def sleep(self, name):
        self.awake -= {item.replica for item in self.operations[name].releases}

    def succeed(self, name):
        self.sleep(name)
        self.awake |= {item.replica for item in self.operations.pop(name).wakes}

    def go_back(self, name):
        self.awake |= {item.replica for item in self.operations.pop(name).releases}


@settings(max_examples=60, deadline=None)
@given(
    rng=st.integers(0, 2**32).map(random.Random),
    limit=st.integers(1, 4),
    most=st.integers(1, 3),
    allocation=st.sampled_from(["share", "load"]),
)
def test_transitions_side_by_side_never_meet_on_a_gpu_and_can_all_go_back(rng, limit, most, allocation):
    counts = {"big": 2, "chat": 2, "code": 1, "text": 1}
    told = {"capacityPrefillTps": 8000, "capacityDecodeTps": 2000}
    rules = {"maxTransitions": limit, "allocation": allocation, "load": {"maxWakes": most}}
    turn = tick_of(counts, dict.fromkeys(counts, QUIET), big=2, **rules)
    policies = tuple(policy(name, gpus=2 if name == "big" else 1, **told) for name in counts)
    actuator, number, moved = SlowActuator(turn), 0, 0
    for step in range(rng.randint(5, 25)):
        now_s = START_S + 5.0 * step
        views = tuple(
            (key(name), window(**rng.choice([STARVING, QUIET, {"decode": 400.0, "running": 15.0}]), end_s=now_s))
            for name in counts
        )
        door = FrontDoor(now_s, ok(0.0), ok(4.0), ok(4000.0), ok(rng.choice([0.0, 1000.0, 8000.0])))
        under = tuple(
            UnderWay(
                name,
                Rule.RESCUE_CRITICAL,
                tuple(sorted({key(item.service) for item in transition.wakes})),
                tuple(sorted({key(item.service) for item in transition.releases})),
                tuple(sorted(item.replica for item in (*transition.releases, *transition.wakes))),
            )
            for name, transition in sorted(actuator.operations.items())
        )
        turn = replace(
            turn,
            now_s=now_s,
            policies=policies,
            views=views,
            fronts=tuple((name, door) for name in counts),
            replicas=facts(turn.overlay, actuator.awake),
            operations=under,
        )
        result = decide_pool(turn)
        turn = replace(turn, awake=result.awake, state=result.state)
        if result.draft is not None and result.draft.transition is not None:
            number, moved = number + 1, moved + 1
            busy = {key.service for item in under for key in (*item.receivers, *item.donors)}
            assert services(result).isdisjoint(busy)
            actuator.operations[f"op-{number}"] = result.draft.transition
        assert len(actuator.operations) <= limit
        for name in sorted(actuator.operations):
            transition = actuator.operations[name]
            end = rng.choice(["wait", "sleep", "succeed", "go back"])
            if end == "sleep":
                actuator.sleep(name)
            elif end == "succeed":
                actuator.succeed(name)
            elif end == "go back":
                actuator.go_back(name)
                back = frozenset(item.replica for item in transition.releases)
                turn = replace(turn, awake=settle(turn.overlay, turn.awake, transition, back))
                assert back <= set(turn.awake), "a donor could not come back"
            actuator.check(turn.pool.spec.budget_gpus)
