"""Sessions that a worker was asked to close and has not confirmed: it frees their KV in any case,
however often the connection breaks, and not only when they have been idle for long."""

from collections import OrderedDict

from outrider.v1 import worker_pb2

_MAX = 8192
"""Of one worker; the oldest are forgotten then."""

ReplyKey = tuple[str, int, int, int]
"""Session id, completion, epoch, number."""


def key_of(header: worker_pb2.EntryHeader | worker_pb2.ReplyHeader) -> ReplyKey:
    return header.session_id, header.completion, header.epoch, header.number


class Closes:
    """What is to be closed in one incarnation of a worker."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._entries: OrderedDict[ReplyKey, worker_pb2.Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, incarnation: int) -> list[worker_pb2.Entry]:
        """This incarnation is there: what is to be sent to it again. Another one has lost all that
        it had anyway."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._entries.clear()
        return list(self._entries.values())

    def add(self, entry: worker_pb2.Entry) -> None:
        self._entries[key_of(entry.header)] = entry
        if len(self._entries) > _MAX:
            self._entries.popitem(last=False)

    def answered(self, key: ReplyKey) -> None:
        """Whatever the answer says: a session that is refused to be closed is somebody else's."""
        self._entries.pop(key, None)
