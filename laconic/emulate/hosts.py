"""Opens an emulated network for one call of `laconic.spawn`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from laconic.emulate.links import check_hosts, parse_links
from laconic.emulate.network import Host, Network


@contextmanager
def hosts_behind(link: str, workers: int) -> Iterator[Sequence[Host] | None]:
    """Opens a network with one host per worker, each behind such a link, for the length of the `with` block.

    Args:
        link: the links, as in `laconic.emulate.parse_links`: "100mbit" for all hosts, "10mbit,1gbit" for one each.
            "none" opens no network.
        workers: the number of hosts.

    Yields:
        The hosts, for the argument `hosts` of `laconic.spawn`; None if the link is "none".

    >>> with hosts_behind("none", 4) as hosts:
    ...     print(hosts)
    None
    """
    check_hosts(workers, "workers on an emulated network")
    if link == "none":
        yield None
        return
    with Network(parse_links(link, workers)) as network:
        yield network.hosts
