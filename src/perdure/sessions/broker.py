"""Issues resume tokens to the holder of a session, and exchanges each for the session and a new token (T5, T10, T12).

`_core.chains` decides what a use of a token does; here it meets the store. Several processes may share that, so
a chain is changed only from what was seen of it, and read again if another process was faster. Nothing is kept in
memory: any node answers, and an answer that was lost may be asked for again.
"""

import contextlib
import logging
from dataclasses import dataclass

from perdure._core import chains
from perdure._core.chains import Action, Chain, Outcome, Token
from perdure._core.ids import SessionId
from perdure._core.states import SessionState
from perdure.errors import SessionEnded, StoreError, StoreUnavailable
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.store import notes
from perdure.telemetry.log_records import log_event

REVOKED = (
    b'{"jsonrpc":"2.0","method":"notifications/perdure/resume_revoked","params":{"reason":"a retired token was used"}}'
)
"""Sent on the session's standalone stream, so that the attached client opens a new chain."""

_TRIES = 32
"""Looks at a chain that other callers keep changing. Each that fails means that another change went through."""

_NO_SESSION = SessionId("-" * 43)
"""Read where there is no chain, so that a caller cannot tell by the time that it takes."""


class Rejected(Exception):
    """The broker rejects a token. The reason is for the log alone: all callers get the same answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUser:
    """The caller that uses a token: its principal, and the holder that it says it is."""

    principal: str
    holder: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Resumed:
    session: SessionId
    token: str


@dataclass(frozen=True, slots=True)
class Broker:
    """Opens chains and takes their tokens; raises `Rejected`, or `StoreError`, with nothing done that matters."""

    _context: ServerContext
    _sessions: SessionRegistry

    async def open(self, session_id: str, caller: TokenUser) -> str:
        """The first token of a new chain, in place of the chain that the session may have."""
        self._refuse_while_failing()
        session = await self._find(session_id, caller)
        random = self._context.random
        token = Token(name=random(chains.NAME_BYTES), secret=random(chains.SECRET_BYTES))
        chain = chains.opened(token, session=session.id, holder=caller.holder)
        if not await notes.put_chain(self._context.store, chain):
            raise self._rejected("the session has ended")
        self._context.counters.resume_chains_opened += 1
        log_event(logging.INFO, "resume.opened", "a session got a chain of resume tokens", session=session.name)
        return token.text

    async def resume(self, text: str, caller: TokenUser) -> Resumed:
        """Find the session of a token. Returns it, and the token for the next time."""
        token, fresh = chains.read_token(text), self._context.random(chains.SECRET_BYTES)
        seen = await self._use(Action.RESUME, token, caller, fresh=fresh)
        session = await self._find(seen.session, caller)
        self._context.counters.resume_tokens_accepted += 1
        log_event(logging.INFO, "resume.accepted", "a resume token led back to its session", session=session.name)
        return Resumed(session=session.id, token=token.renewed(fresh).text)

    async def confirm(self, text: str, caller: TokenUser) -> None:
        """Retire the earlier token: the holder has stored the new one."""
        await self._use(Action.CONFIRM, chains.read_token(text), caller)

    async def revoke(self, text: str, caller: TokenUser) -> None:
        """End the chain. The caller does not learn whether there was one."""
        with contextlib.suppress(Rejected):
            await self._use(Action.REVOKE, chains.read_token(text), caller)

    async def _use(self, action: Action, token: Token, caller: TokenUser, *, fresh: bytes = b"") -> Chain:
        """Use a token as the table says. Returns its chain as it was before."""
        self._refuse_while_failing()
        for _ in range(_TRIES):
            seen = await self._chain(token, caller)
            chain, outcome = chains.use(seen, action, token, fresh=fresh)
            if chain == seen or await notes.change_chain(self._context.store, seen, chain):
                if outcome is Outcome.REUSED:
                    await self._tell_revoked(seen, action)
                    raise self._rejected("the token was retired before")
                return seen
        raise StoreUnavailable("a chain of resume tokens changed faster than it could be read")

    async def _chain(self, token: Token, caller: TokenUser) -> Chain:
        """The chain that a token names, if the caller is its holder; a stranger's use does nothing to it."""
        store = self._context.store
        chain = await notes.chain_by_name(store, chains.hashed(token.name))
        record = await store.session(_NO_SESSION if chain is None else chain.session)
        if chain is None:
            raise self._rejected("no chain has such a token")
        if record is None or record.state is SessionState.ENDED:
            raise self._rejected("the session has ended")
        if record.owner != caller.principal:
            raise self._rejected("the session is another principal's")
        if not chains.is_held_by(chain, caller.holder):
            raise self._rejected("the chain is another holder's")
        return chain

    async def _find(self, session_id: str, caller: TokenUser) -> Session:
        """The caller's session, which is in use from now on."""
        with contextlib.suppress(SessionEnded):
            session = await self._sessions.find(session_id, caller.principal)
            if session is not None and session.state is not SessionState.OPENING:
                with session.in_use():
                    await session.come_back()
                return session
        raise self._rejected("there is no such session for the caller")

    async def _tell_revoked(self, chain: Chain, action: Action) -> None:
        """A token was used twice. The attached client keeps the session, and is notified that it needs a new chain."""
        self._context.counters.resume_chains_revoked += 1
        name = chain.session[:8]
        self._context.peer_log.log_event(
            logging.WARNING,
            "resume.revoked",
            f"a resume token that had been retired was used again ({action.value}): its chain is revoked",
            session=name,
        )
        try:
            session = await self._sessions.load(chain.session)
            if session is not None:
                session.home.send(REVOKED)
                await session.home.forwarded()
        except (StoreError, SessionEnded) as failure:
            self._context.peer_log.log_event(
                logging.WARNING,
                "resume.untold",
                f"the client was not notified of a revoked chain: {failure}",
                session=name,
            )

    def _rejected(self, why: str) -> Rejected:
        self._context.counters.resume_tokens_rejected += 1
        self._context.peer_log.log_event(logging.INFO, "resume.rejected", f"a resume token was rejected: {why}")
        return Rejected(why)

    def _refuse_while_failing(self) -> None:
        """Refuse while this process holds anything: a session may have ended in what the store does not have."""
        if self._context.journal.is_degraded:
            raise StoreUnavailable
