"""The Actor: acts with the newest weights and sends what happened: unrolls to a stream, or items to replay tables."""

from __future__ import annotations

from shoal.core import Call, Me, Reader, Sink
from shoal.roles.data_path import producer_end
from shoal.roles.parts import Parts
from shoal.roles.player import Player

__all__ = ["Actor"]


class Actor:
    """Acts in its environments with the newest weights and sends what happened."""

    def __init__(self, me: Me, parts: Parts, experience: Sink | Call, weights: Reader, per_version: int = 0,
                 record: str | None = None) -> None:
        """It sends `per_version` slots with each version of the weights, then waits for the next one (0: never waits). `record` is
        a folder to write its episodes to as well."""
        self.me, self.weights, self.per_version = me, weights, per_version
        self.experience = producer_end(me, parts, experience)
        self.player = Player(me, parts, record)
        self.player.lock_step = per_version > 0
        self.published = parts.algorithm.published_layout().empty()
        self.sent = 0

    async def step(self) -> None:
        version = self.player.version
        if version == 0 or (self.per_version and self.sent >= self.per_version):
            await self.weights.newer_than(version)
        slot = await self.experience.slot()
        self._refresh()  # only now: weights published while it waited for a slot are younger
        await self._permit()
        self.player.play(slot.data)
        slot.send()
        self.sent += 1

    async def _permit(self) -> None:
        """Wait for the rest of the env_steps budget, if there is any. In lock step a round is allowed to all actors or to none."""
        if self.per_version:
            await self.me.permit("env_steps", self.per_version * self.player.expected, self.player.version)
        else:
            await self.me.permit("env_steps", self.player.expected)

    def _refresh(self) -> None:
        """Take newer weights, if there are any, at the start of an unroll (IMPALA, section 3)."""
        if self.weights.version == self.player.version:
            return
        with self.me.stats.phase("pull"):
            version, self.sent = self.weights.pull(self.published), 0
            self.player.load(self.published, version, self.me.index, self.me.replicas)
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)

    def close(self) -> None:
        self.player.close()
