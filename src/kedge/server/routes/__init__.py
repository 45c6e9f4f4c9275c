"""The endpoints of the server, one module per resource.

Chat Completions (``chat_completions``) and Anthropic's Messages (``messages``) are stateless: ``chat_requests`` and
``message_requests`` check their requests and convert them to items and parameters of the Responses API.
``message_schema`` and ``message_errors`` have the parameters and the errors of Messages.
"""
