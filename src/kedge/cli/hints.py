"""What a user can do about an error, where the error itself does not say it."""

from kedge import errors

HINTS: dict[type[BaseException], str] = {
    errors.NotAuthorised: "'kedge doctor' tells which keys are set.",
    errors.CannotConnect: "'kedge doctor' tells which keys are set, and what is missing.",
    errors.RateLimited: "Wait a little, and try again.",
    errors.Unreachable: "Is the server running? 'kedge doctor --online' looks.",
    errors.ServerFailed: "It may work later; the conversation is as it was.",
    errors.StreamCut: "It may work later; the conversation is as it was.",
    errors.InvalidJSON: "Is the text UTF-8? 'iconv -f latin1 -t utf-8' converts it.",
    errors.InvalidSetting: "'kedge doctor' tells whether anything else is wrong.",
}


def hint_for(error: BaseException) -> str:
    """A line of advice, or nothing."""
    for kind in type(error).__mro__:
        if kind in HINTS:
            return HINTS[kind]
    return ""
