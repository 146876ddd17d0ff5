"""How often a bucketed program records and replays: what tests of its decisions count."""

from __future__ import annotations

from typing import Any

import pytest

from subtensors.bucketed.bucket import Bucket
from subtensors.bucketed.graph_cache import GraphCache
from subtensors.bucketed.trained_bucket import TrainedBucket


class Counted:
    """How often buckets were recorded, and replayed to answer other calls than the first; counted where it is done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.recorded = self.replayed = 0
        replay, first = Bucket.replay, GraphCache.first_call

        def count_captures(cls: type[Bucket]) -> None:
            capture = cls.capture

            def counting_capture(bucket: Any) -> None:
                self.recorded += 1
                capture(bucket)

            patch.setattr(cls, "capture", counting_capture)

        def counting_replay(bucket: Any, *args: Any) -> None:
            self.replayed += 1
            replay(bucket, *args)

        def uncounted_first(graph_cache: Any, *args: Any) -> Any:
            replayed = self.replayed
            answer = first(graph_cache, *args)
            self.replayed = replayed
            return answer

        for cls in (Bucket, TrainedBucket):
            count_captures(cls)
        patch.setattr(Bucket, "replay", counting_replay)
        patch.setattr(GraphCache, "first_call", uncounted_first)

    def take(self) -> tuple[int, int]:
        """Recordings and replays since the last time."""
        found = self.recorded, self.replayed
        self.recorded = self.replayed = 0
        return found
