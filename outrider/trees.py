"""The shape of a tree of guesses, given by the parent of each node.

`parents[i]` is the index of node i's parent, -1 for a child of the base; a parent comes before its
children. A node's depth is the number of its ancestors: 0 for a child of the base. The spine is the
chain that the tree starts with: the longest prefix of nodes that follow each other.
"""

from collections.abc import Sequence


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def spine_length(parents: Sequence[int]) -> int:
    """How many nodes the spine has."""
    for node, parent in enumerate(parents):
        if parent != node - 1:
            return node
    return len(parents)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether there is nothing beside the spine."""
    return spine_length(parents) == len(parents)
