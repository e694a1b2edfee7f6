"""How the machines of a job meet.

They do so by torch's own rendezvous, the only one that can restart them all. It numbers them as it likes, while
whoever says `--node-rank 0` expects rank 0 there: its data, its files, its log. So the numbers are kept here, and rank
0 is reached at the address that the user gave, which the others have just proved to know.
"""

from __future__ import annotations

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its types leave it out
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from accelcore.cli.elastic import BACKEND, NODE

__all__ = ["register"]


class _Numbered(RendezvousHandler):
    """A rendezvous of machines that have their numbers already.

    Args:
        inner: lets them meet.
        node: this machine's number.
        endpoint: where machine 0 can be reached, HOST:PORT.
    """

    def __init__(self, inner: RendezvousHandler, node: int, endpoint: str) -> None:
        self._inner, self._node = inner, node
        self._host, _ = parse_rendezvous_endpoint(endpoint, default_port=0)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False  # rank 0 has a store, a new one at each start: addresses of ranks that are gone are in none

    def next_rendezvous(self) -> RendezvousInfo:
        met = self._inner.next_rendezvous()
        numbered = PrefixStore("numbered", met.store)
        if numbered.add(f"{NODE} {self._node}", 1) > 1:
            raise RendezvousError(f"two machines say --node-rank {self._node}")
        place = RendezvousStoreInfo.build(self._node, numbered, self._host)
        return RendezvousInfo(met.store, self._node, met.world_size, place)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    node = parameters.get_as_int(NODE)
    assert node is not None
    backend, store = create_backend(parameters)
    return _Numbered(create_handler(store, backend, parameters), node, parameters.endpoint)


def register() -> None:
    """Let the launcher know of it, as the `--rdzv-backend` of that name."""
    rendezvous_handler_registry.register(BACKEND, _create)
