"""Encoding and decoding of the stored JSON form of blocks."""

import json

import pytest
from hypothesis import given

from for_each import for_each
from kedge import user
from kedge._internal.json_text import encode_text as encode
from kedge.errors import KedgeError, StoreDamaged
from kedge.store.stored_blocks import decode_blocks, extract_search_text, to_stored_block
from kedge.turns import Block, dump_block, load_block
from kedge.turns.json_codec import encode_block
from strategies import blocks


@given(blocks())
def test_encoded_blocks_are_decoded(block: Block) -> None:
    """Both encoders write the same bytes, which decode to the block with its id, metadata and unknown members."""
    body = encode_block(block)
    assert body == encode(dump_block(block))
    (decoded,) = decode_blocks([body])
    assert decoded == block
    assert dump_block(decoded) == dump_block(block)
    assert type(decoded) is type(block)


TEXT = '{"type":"text","text":"hi"}'
UNUSUAL = [
    *('"metadata":{"a":1,"b":"ä\\u00e4"}', '"metadata":{}', '"metadata":{"a":{"b":[1]}}'),
    *('"metadata":{"a":true}', '"metadata":{"a":1.5}', '"metadata":{"a":null}', '"metadata":null'),
    *(f'"metadata":{{"a":{number}}}' for number in (2**62 - 1, 2**62, -(2**62), 2**63, 10**30)),
    *('"origin":"engine"', '"origin":"my guard"', '"origin":""', '"origin":null', '"origin":1'),
    *('"other":1', '"extra":{}', '"id":""', '"id":1', '"custom":true', '"custom":false'),
    *('"parts":[]', f'"parts":[{TEXT},{TEXT}]', '"parts":[{"type":"text"}]', '"parts":"hi"'),
    '"parts":[{"type":"text","text":"hi","new":1}]',
    '"parts":[{"type":"text","text":"\\ud800"}]',
    '"parts":[{"type":"text","text":"\\ud83d\\ude00 \\u0000"}]',
    '"parts":[{"type":"refusal","refusal":"no"}]',
]
"""Members that follow those of a plain block, and replace those of the same name."""
PLAIN = [
    f'"kind":"user","id":"b","parts":[{TEXT}]',
    f'"kind":"assistant","id":"b","parts":[{TEXT}]',
    f'"kind":"tool_result","id":"b","call_id":"c","parts":[{TEXT}]',
    '"kind":"tool_call","id":"b","call_id":"c","name":"n","arguments":"{}"',
    '"kind":"system","id":"b","text":"hi"',
]


@for_each("plain", PLAIN)
def test_typed_decoder_matches_general_decoder(plain: str) -> None:
    """The typed decoder returns the same block as the general one, or an error where that raises one."""
    for unusual in ("", *(f",{members}" for members in UNUSUAL)):
        body = f"{{{plain}{unusual}}}"
        try:
            expected = load_block(json.loads(body))
        except (KedgeError, ValueError, TypeError):
            with pytest.raises(StoreDamaged):
                decode_blocks([body])
            continue
        (block,) = decode_blocks([body])
        assert type(block) is type(expected)
        assert encode(dump_block(block)) == encode(dump_block(expected))
        assert block == expected


def test_hash_covers_metadata_id_and_origin() -> None:
    """Blocks that differ only in id, metadata or origin have different hashes."""
    block = user("hello", id="a")
    others = [user("hello", id="b"), block.with_metadata(x=1), block.with_origin("me")]
    names = {to_stored_block(each).hash for each in (block, *others)}
    assert len(names) == 4


def test_damaged_block_is_reported() -> None:
    """Text that is not exactly one block raises `StoreDamaged` with the index of the block."""
    good = encode_block(user("hello"))
    for bad in ("", f"{good},{good}", "null", "[]", '"x"', '{"kind":"user"}', "{"):
        with pytest.raises(StoreDamaged, match="block 1"):
            decode_blocks([good, bad])


def test_extract_text_returns_content_only() -> None:
    """Ids and encrypted content are not part of the extracted text."""
    body = json.dumps({"kind": "reasoning", "id": "blk_1", "encrypted_content": "secret"})
    assert extract_search_text(body) == ""
    assert extract_search_text(encode_block(user("hello"))) == "hello"
