"""Among plans of equal cost, move to the one that the caller prefers: lower strategy indices.

Strategies get a bonus per index that is too small to outweigh a real difference in cost (1e-10 of the
objective over the whole plan). Where elimination can solve the whole graph this finds a plan of least index
sum; elsewhere forest steps and single moves reach one that neither can improve. Either way the same input
gives the same plan.
"""

from search import elimination
from search.descent import Descent
from search.graph import Graph
from search.incumbent import Incumbent
from search.neighbourhood import Neighbourhood

FORESTS = 6
CAP = 1 << 18  # table entries up to which the whole graph is solved again for the sake of ties


def settle(graph: Graph, best: Incumbent, seed: int) -> None:
    """Replace the incumbent by an equally cheap plan of lower indices, if there is one.

    Args:
        graph: all permitted strategies, as dominance drops some that cost the same here.
        best: has the plan; its cost does not change beyond rounding.
        seed: of the forests.

    """
    if best.choice is None:
        return
    plan = graph.positions(best.choice)
    if plan is None:
        return
    step = 1e-10 * abs(best.objective) / max(1, sum(int(k.max()) for k in graph.kept))
    unary = list(graph.unary)
    for owner, kept in zip(graph.owner, graph.kept, strict=True):
        if owner >= 0:
            unary[owner] = unary[owner] + step * kept
    order = elimination.plan(graph.sizes, graph.pairs, cap=CAP)
    if order is not None and graph.memory is None:
        _, trial = order.minimum(unary, graph.pairs)
        if best.prefer(graph.original(trial)):
            plan = trial
    else:
        moves = Neighbourhood(graph, seed)
        for _ in range(FORESTS):
            if not best.left:
                return
            trial = moves.step(unary, plan, moves.forest(len(plan)))
            if _lower(graph, trial, plan) and best.prefer(graph.original(trial)):
                plan = trial
    trial = Descent(graph).polish(plan, ties=True)
    if _lower(graph, trial, plan):
        best.prefer(graph.original(trial))


def _lower(graph: Graph, a: list[int], b: list[int]) -> bool:
    first, second = graph.original(a), graph.original(b)
    return (sum(first), first) < (sum(second), second)
