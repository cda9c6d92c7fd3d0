"""Which lane gives which row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.live.share import Share


@given(world_size=st.integers(1, 6), lanes_each=st.integers(1, 5), rows_per_lane=st.integers(1, 4), data=st.data())
def test_the_ranks_together_draw_every_lane_in_the_order_of_the_rows(world_size, lanes_each, rows_per_lane, data):
    """[E1.a]"""
    lanes = world_size * lanes_each
    rows = lanes_each * rows_per_lane
    micro_batch = data.draw(st.sampled_from([size for size in range(1, rows + 1) if rows % size == 0]))
    shares = [
        Share(
            lanes=lanes,
            global_batch_size=lanes * rows_per_lane,
            rank=rank,
            world_size=world_size,
            micro_batch=micro_batch,
        )
        for rank in range(world_size)
    ]
    drawn = [lane for share in shares for batch in range(share.batches) for lane in share.lanes_of(batch)]
    assert drawn == [lane for lane in range(lanes) for _ in range(rows_per_lane)]
    assert [lane for share in shares for lane in share.own] == list(range(lanes))
    for share in shares:
        assert {lane for batch in range(share.batches) for lane in share.lanes_of(batch)} == set(share.own)
