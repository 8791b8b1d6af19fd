"""Sentinels fail over, and a cluster shares its keys.

``LEASECRON_SYNC_LONG=1`` in the environment does it with Valkey too.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from tests.services.fixtures import Own
from tests.services.process import eventually
from tests.services.resp import ReplyError

LIMIT_S = 20.0
# Both take seconds, and what they are about differs little between the two.
KINDS = ["redis", "valkey"] if os.environ.get("LEASECRON_SYNC_LONG") else ["redis"]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_sentinels_lead_to_the_primary_before_and_after_a_failover(own: Own, kind: str) -> None:
    # Typed in part only, and differently by version.
    sentinels: Any = importlib.import_module("redis.sentinel")
    group = own.sentinels(kind, requirepass="secret")
    first, second = group.servers
    sentinel = sentinels.Sentinel(group.addresses)
    client = sentinel.master_for(group.service, password="secret")
    try:
        assert group.primary() is first
        assert client.set("key", "value")
        assert first.do("GET", "key") == "value"
        assert eventually(lambda: second.do("GET", "key") == "value", LIMIT_S)
        with pytest.raises(ReplyError, match="READONLY"):
            second.do("SET", "key", "other")
        first.kill()
        assert eventually(lambda: group.primary() is second, LIMIT_S)
        assert client.set("key", "other")
        assert second.do("GET", "key") == "other"
    finally:
        client.close()
        for one in sentinel.sentinels:
            one.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_has_every_key_once_and_a_client_finds_it(own: Own, kind: str) -> None:
    from redis.cluster import RedisCluster

    group = own.cluster(kind)
    client = RedisCluster(host=group.addresses[0][0], port=group.addresses[0][1])
    keys = [f"key-{number}" for number in range(30)]
    try:
        for key in keys:
            assert client.set(key, "value")
    finally:
        client.close()
    owners = [group.node_of(key) for key in keys]
    assert set(owners) == set(group.nodes)
    for key, owner in zip(keys, owners):
        assert owner.do("GET", key) == "value"
        other = next(node for node in group.nodes if node is not owner)
        with pytest.raises(ReplyError, match="MOVED"):
            other.do("GET", key)
    # A node that was killed comes back with its keys.
    owners[0].kill()
    owners[0].start()
    group.wait_complete()
    assert owners[0].do("GET", keys[0]) == "value"
