"""The stored form of a block is its JSON form, written and read quickly."""

import json

import pytest
from hypothesis import given

from kedge import user
from kedge.errors import KedgeError, StoreDamaged
from kedge.json_codec import encode_text as encode
from kedge.store.block_codec import decode_blocks, extract_text, hash_block
from kedge.turns import Block, dump_block, load_block
from kedge.turns.block_codec import encode_block
from strategies import blocks, sample_blocks


@given(blocks())
def test_the_direct_path_writes_the_same_bytes_as_the_general_one(block: Block) -> None:
    """Byte for byte, for any block."""
    assert encode_block(block) == encode(dump_block(block))


@given(blocks())
def test_encoded_blocks_are_decoded(block: Block) -> None:
    """With everything: id, metadata, origin and members that Kedge does not know."""
    (again,) = decode_blocks([encode_block(block)])
    assert again == block
    assert dump_block(again) == dump_block(block)
    assert type(again) is type(block)


@pytest.mark.parametrize("block", sample_blocks(), ids=lambda block: block.kind)
def test_every_kind_of_block_round_trips(block: Block) -> None:
    """The samples, one of each kind."""
    (again,) = decode_blocks([encode_block(block)])
    assert dump_block(again) == dump_block(block)


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


@pytest.mark.parametrize("plain", PLAIN)
def test_the_typed_path_reads_the_same_blocks_as_the_general_one(plain: str) -> None:
    """The same block, or an error where that has one."""
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


def test_the_hash_covers_everything() -> None:
    """A difference in metadata or id alone is a difference."""
    block = user("hello", id="a")
    others = [user("hello", id="b"), block.with_metadata(x=1), block.with_origin("me")]
    names = {hash_block(encode_block(each)) for each in (block, *others)}
    assert len(names) == 4


def test_a_damaged_block_is_reported_alone() -> None:
    """A text that holds two blocks, or none, is not read as something else."""
    good = encode_block(user("hello"))
    for bad in ("", f"{good},{good}", "null", "[]", '"x"', '{"kind":"user"}', "{"):
        with pytest.raises(StoreDamaged, match="block 1"):
            decode_blocks([good, bad])


def test_extract_text_returns_content_only() -> None:
    """Ids and encrypted content are no words."""
    body = json.dumps({"kind": "reasoning", "id": "blk_1", "encrypted_content": "secret"})
    assert extract_text(body) == ""
    assert extract_text(encode_block(user("hello"))) == "hello"
