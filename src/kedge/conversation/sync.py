"""The methods of a conversation for sync code."""

from kedge.conversation.conversation import Conversation
from kedge.engines.sync import SyncFacade, wrap_method, wrap_stream


class SyncConversation(SyncFacade[Conversation]):
    """The async methods of ``Conversation`` for sync code; see ``Conversation.sync``.

    Members that are not async, such as ``title``, ``turn`` and ``plan``, are used on the conversation itself.
    """

    send = wrap_method(Conversation.send)
    stream = wrap_stream(Conversation.stream)
    resume = wrap_method(Conversation.resume)
    stream_resume = wrap_stream(Conversation.stream_resume)
    regenerate = wrap_method(Conversation.regenerate)
    stream_regenerate = wrap_stream(Conversation.stream_regenerate)
    pending = wrap_method(Conversation.pending)
    append = wrap_method(Conversation.append)
    probe_and_plan = wrap_method(Conversation.probe_and_plan)

    refresh = wrap_method(Conversation.refresh)
    tree = wrap_method(Conversation.tree)
    path = wrap_method(Conversation.path)
    diff = wrap_method(Conversation.diff)
    goto = wrap_method(Conversation.goto)
    fork = wrap_method(Conversation.fork)
    undo = wrap_method(Conversation.undo)
    redo = wrap_method(Conversation.redo)

    insert = wrap_method(Conversation.insert)
    remove = wrap_method(Conversation.remove)
    truncate = wrap_method(Conversation.truncate)
    replace = wrap_method(Conversation.replace)
    edit = wrap_method(Conversation.edit)
    merge_summary_of = wrap_method(Conversation.merge_summary_of)

    rename = wrap_method(Conversation.rename)
    tag = wrap_method(Conversation.tag)
    untag = wrap_method(Conversation.untag)
    archive = wrap_method(Conversation.archive)
    delete = wrap_method(Conversation.delete)
    export = wrap_method(Conversation.export)
    responses = wrap_method(Conversation.responses)
    close = wrap_method(Conversation.aclose)
