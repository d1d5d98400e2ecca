"""Keeps one `subscriptions/listen` open, over as many connections as it takes (`_core/listening.py` has the rules)."""

from perdure._core import splice
from perdure._core.envelope import SUBSCRIPTION
from perdure._core.listening import Subscription
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.requests import Request, Requests, Take
from perdure.remote.stream import pause_before_return


async def listen(requests: Requests, request: Request, subscriber_id: str, deliver: Take) -> Message:
    """The answer to the request, once it is not sent again.

    `deliver` hands notifications on, under the id by which the subscriber knows the subscription, given as JSON.
    """
    subscription = Subscription()

    async def take(message: Message) -> None:
        nonlocal subscription
        if message.method is None or message.is_request:
            return
        subscription, hands_on, cues = subscription.heard(message.method, message.params)
        texts = [message.text] if hands_on else []
        for method, params in cues:
            texts.append(encode({"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": {SUBSCRIPTION: 0}}}))
        for text in texts:
            await deliver(messages_in(splice.replaced(text, subscriber_id, "params", "_meta", SUBSCRIPTION))[0])

    while True:
        answer = await requests.send(request, take, patience=requests.limits.listening)
        if (after := subscription.ended(is_error=answer.is_error)) is None:
            return answer
        subscription = after
        await pause_before_return(after.barren, requests.limits.listening)
