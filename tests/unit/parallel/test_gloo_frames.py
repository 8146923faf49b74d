"""Small messages in one frame, and out of it again."""

from __future__ import annotations

import torch

from nnsight_pp.parallel import gloo_peer

MESSAGES = [
    (1, b"question", []),
    (2, b"an answer", [torch.arange(7).byte(), torch.arange(5).byte()]),
    (3, b"", [torch.arange(3).byte()]),
]


def test_small_messages_leave_a_frame_as_they_came_into_it():
    (parts,) = gloo_peer._joined(MESSAGES)
    (frame,) = parts
    magic, kind, head_length, length = gloo_peer._PREFIX.unpack_from(frame.numpy().data)
    assert (magic, kind, head_length) == (gloo_peer._MAGIC, gloo_peer._TOGETHER, 0)
    found = list(gloo_peer._apart(frame[gloo_peer._PREFIX.size :][:length]))
    assert [one[:2] for one in found] == [one[:2] for one in MESSAGES]
    for (_, _, payload), (_, _, pieces) in zip(found, MESSAGES, strict=True):
        assert payload.tolist() == [number for piece in pieces for number in piece.tolist()]
        assert payload.data_ptr() % 16 == 0


def test_one_message_has_a_frame_of_its_own_kind():
    ((frame,),) = gloo_peer._joined(MESSAGES[:1])
    assert gloo_peer._PREFIX.unpack_from(frame.numpy().data)[1] == 1
    assert gloo_peer._joined([]) == []
