"""Events of other servers are read whole, however the network cuts them and whatever their texts hold."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import nullcontext

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinkfold.deploy.remote.events import DONE, DataLines
from thinkfold.deploy.remote.http import Api, Remote
from thinkfold.errors import RemoteError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5)
OTHERS = st.sampled_from(["", ": keep-alive\n\n", "event: x\n", "id: 1\n", "data:\n", "data\n", "\n"])
CUTS = st.lists(st.integers(0, 400), max_size=20)
ENDS = st.sampled_from(["\n", "\r\n"])
SEPARATORS = ["a\u2028b", "\u2029", "\x85", "\x0b\x0c\x1c\x1d\x1e", "\r\n", "[DONE]", "data: x"]


@settings(max_examples=400, deadline=None)
@given(TEXTS, OTHERS, CUTS, ENDS)
@example(SEPARATORS, ": keep-alive\n\n", [3, 9, 27], "\n")
def test_texts_come_back_however_they_are_cut(texts: list[str], other: str, cuts: list[int], end: str) -> None:
    sent = "".join(f"{other}data: {json.dumps({'t': t}, ensure_ascii=False)}\n\n" for t in texts) + "data: [DONE]\n\n"
    raw, lines, places = sent.replace("\n", end).encode(), DataLines(), [0, *sorted(cuts), None]
    found = [data for a, b in itertools.pairwise(places) for data in lines.read(raw[a:b])]
    assert found.pop() == DONE and [json.loads(data)["t"] for data in found] == texts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=6))
def test_any_bytes_are_lines(chunks: list[bytes]) -> None:
    lines = DataLines()
    found = [data for chunk in chunks for data in lines.read(chunk)]
    assert all(data and b"\n" not in data for data in found)


@pytest.mark.parametrize(
    ("last", "says"),
    [(b"data: [DONE]", None), (b"data: \xff", "sent no JSON"), (b'data: {"error": "gone"}', "gone")],
)
async def test_a_stream_of_a_server(last: bytes, says: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for text in SEPARATORS:
            writer.write(f"data: {json.dumps({'t': text}, ensure_ascii=False)}\n\n".encode())
            await writer.drain()
        writer.write(last + b"\n\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    api, found = Api(Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")), list[str]()
    with nullcontext() if says is None else pytest.raises(RemoteError, match=says):
        async for each in api.stream("/v1/completions", {}):
            found.append(each["t"])
    await api.close()
    server.close()
    assert found == SEPARATORS
