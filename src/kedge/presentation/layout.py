"""The layout of a tree in lanes, from the root down: the page draws it as SVG, and `kedge tree` as text.

Rows of a layout are in the order of a walk that finishes every side branch before the main line continues, so
a side branch needs one lane more than its parent line, and lanes are reused. The main line is the one
that leads to the chosen node; elsewhere it is the longer one. No function is recursive, because a tree may be
deep.
"""

import sys
from collections.abc import Container, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from kedge.presentation.response_tree import Totals, TreeNode
from kedge.store.tree import walk_up

ALL_NODES: Container[int] = range(sys.maxsize)
"""Contains every node id: as ``unfolded`` of a layout, no run is folded."""
MIN_FOLD_LENGTH = 4
"""The minimum number of nodes in a run that is folded."""


class LayoutRow(msgspec.Struct, frozen=True):
    """One row of a layout: a node, or a folded run of nodes."""

    lane: int
    nodes: tuple[TreeNode, ...]
    on_path: bool = False
    branch: Totals | None = None
    """The totals of the branch, in the row of its last node."""

    @property
    def node(self) -> TreeNode:
        """The node of this row; the last one of a fold."""
        return self.nodes[-1]

    @property
    def is_fold(self) -> bool:
        """Whether several nodes are folded here."""
        return len(self.nodes) > 1

    @property
    def sums(self) -> Totals:
        """The totals of the nodes of this row."""
        return sum((node.sums for node in self.nodes), Totals())


class LayoutEdge(msgspec.Struct, frozen=True):
    """A line from one row to a later one; it bends just above the later one if the lanes differ."""

    start: int
    end: int
    lane: int
    to_lane: int
    on_path: bool = False


class Layout(msgspec.Struct, frozen=True):
    """The layout of a tree in lanes, from the root down."""

    rows: tuple[LayoutRow, ...] = ()
    edges: tuple[LayoutEdge, ...] = ()
    lanes: int = 0


def compute_layout(
    nodes: Iterable[TreeNode], chosen: int = 0, unfolded: Container[int] = ()
) -> Layout:
    """Lay out all nodes; long runs without a branch or a mark are folded into one row.

    Args:
        nodes: The nodes.
        chosen: The node that the main line leads to.
        unfolded: Nodes whose run is not folded; `ALL_NODES` folds none.
    """
    tree = _Tree(nodes, chosen)
    rows: list[LayoutRow] = []
    edges: list[LayoutEdge] = []
    # Nodes that have no row yet, each with its lane, the row of its parent, and the totals of its branch.
    waiting = [(node, 0, -1, Totals()) for node in reversed(tree.sort_children(0))]
    while waiting:
        node, lane, parent_row, branch_sums = waiting.pop()
        run = tree.collect_run(node, unfolded)
        row_nodes = tuple(tree.nodes[each] for each in run)
        on_main_line = tree.on_path.issuperset((node, run[-1]))
        branch_sums += sum((each.sums for each in row_nodes), Totals())
        children = tree.sort_children(run[-1])
        index = len(rows)
        row = LayoutRow(lane, row_nodes, on_main_line)
        rows.append(row if children else replace(row, branch=branch_sums))
        if parent_row >= 0:
            edges.append(LayoutEdge(parent_row, index, rows[parent_row].lane, lane, on_main_line))
        if children:
            # The last child continues the line, so it is placed after the branches of the others.
            waiting.append((children[-1], lane, index, branch_sums))
            waiting += [(side, lane + 1, index, Totals()) for side in reversed(children[:-1])]

    lanes = max((row.lane for row in rows), default=-1) + 1
    return Layout(tuple(rows), tuple(edges), lanes)


class _Tree:
    """Children, subtree sizes and the main line of a tree."""

    def __init__(self, nodes: Iterable[TreeNode], chosen: int) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.chosen = chosen
        self.on_path = {node.id for node in walk_up(self.nodes, chosen)}
        self.children = self._list_children()
        self.sizes = self._count_descendants()
        self.not_folded: set[int] = set()
        """Nodes of runs that were checked and are not folded."""

    def _list_children(self) -> dict[int, list[int]]:
        """Return the children of each node; those without a parent are children of 0."""
        children: dict[int, list[int]] = {}
        for node in self.nodes.values():
            parent = node.parent
            if parent not in self.nodes or parent == node.id:
                parent = 0
            children.setdefault(parent, []).append(node.id)
        return children

    def _count_descendants(self) -> dict[int, int]:
        """Return the size of the subtree of each node; nodes in a cycle are omitted."""
        order = list(self.children.get(0, ()))  # each node after its parent
        for node in order:
            order += self.children.get(node, ())
        sizes: dict[int, int] = {}
        for node in reversed(order):
            sizes[node] = 1 + sum(sizes[child] for child in self.children.get(node, ()))
        return sizes

    def sort_children(self, node: int) -> list[int]:
        """Return the children of a node; the last one continues the line."""
        children = self.children.get(node, [])
        return sorted(children, key=lambda child: (child in self.on_path, self.sizes[child]))

    def collect_run(self, node: int, unfolded: Container[int]) -> Sequence[int]:
        """Return the nodes of the row: this one alone, or a run long enough to fold."""
        if node in self.not_folded:
            return (node,)
        run: list[int] = []
        next_node = node
        while self._is_foldable(next_node):
            run.append(next_node)
            (next_node,) = self.children[next_node]
        if len(run) < MIN_FOLD_LENGTH or any(each in unfolded for each in run):
            self.not_folded.update(run)
            return (node,)
        return run

    def _is_foldable(self, node: int) -> bool:
        """Return whether a node can be folded: inside a line and without marks."""
        tree_node = self.nodes[node]
        if tree_node.marks or node == self.chosen or tree_node.parent not in self.nodes:
            return False
        siblings = self.children.get(tree_node.parent, ())
        return len(siblings) == 1 and len(self.children.get(node, ())) == 1
