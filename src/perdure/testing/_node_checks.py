"""Promises 8, 10, 11 and 15: hints, mail, which nodes are dead, and which hold what is not written."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from perdure._core.ids import NodeId, StreamId
from perdure.errors import MailFull, NodeGone
from perdure.store import base
from perdure.testing._case import StreamCase, accepted, refused, same
from perdure.testing._values import NODE, OTHER, SESSION, STREAM, a_reader, a_stream, messages, put

THIRD = NodeId("third")
LEASE = 15.0


class MailChecks(StreamCase):
    """Promises 8 and 10: hints and mail."""

    async def promise_8_reading_tells_the_truth_with_and_without_a_listener(self) -> None:
        stop = self.store.subscribe(NODE, lambda streams: None)
        await self.put(self.append(1))
        same("events while listening", await self.numbers(), [1])
        stop()
        stop()
        await self.put(self.append(2))
        same("events without", await self.numbers(), [1, 2])

    async def promise_8_a_hint_reaches_the_node_that_it_is_for(self) -> None:
        """By name, or as the word that something was written: then all is looked at."""
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            stop = elsewhere.subscribe(OTHER, told.put_nowait)
            self.store.hint(OTHER, [StreamId("grown"), STREAM])
            await self._told(told, "grown")
            await self.accept(base.SendMail(node=OTHER, message=b"look"))
            await self._told(told)
            stop()
            self.store.hint(OTHER, [STREAM])
            self.store.hint(NodeId("unknown"), [STREAM])
            same("mail", await messages(elsewhere, OTHER), [b"look"])

    async def _told(self, queue: asyncio.Queue[Sequence[StreamId]], name: str | None = None) -> None:
        """Wait for a hint at a stream, or at everything."""
        try:
            async with asyncio.timeout(self.patience):
                while (streams := await queue.get()) and name not in streams:
                    pass
        except TimeoutError:
            raise AssertionError(f"no hint at {name or 'the mail'} came within {self.patience} seconds") from None

    async def equal_stamps_mean_that_no_other_process_has_written(self) -> None:
        async with self.elsewhere() as elsewhere:
            for number in range(3):
                before = self.store.stamp()
                accepted(await put(elsewhere, base.ChangeSession(session=SESSION, active=float(number))))
                assert self.store.stamp() != before, f"the stamp {before!r} stayed, though another process has written"
                before = self.store.stamp()
                await elsewhere.reattach(SESSION)
                assert self.store.stamp() != before, f"the stamp {before!r} stayed at the begin of an incarnation"

    async def promise_10_mail_stays_until_it_was_received(self) -> None:
        await self.store.join(OTHER)
        await self.put(*(base.SendMail(node=NODE, message=b"%d" % number) for number in range(5)))
        await self.put(base.SendMail(node=OTHER, message=b"theirs"))
        await self.reopen()
        mail = list(await self.store.mail(NODE))
        same("mail", [message for _, message in mail], [b"0", b"1", b"2", b"3", b"4"])
        same("keys in order", [key for key, _ in mail], sorted({key for key, _ in mail}))
        same("mail read before", list(await self.store.mail(NODE)), mail)
        for _ in range(2):
            await self.put(base.MailReceived(node=NODE, through=mail[2].key))
            same("mail that was not received", list(await self.store.mail(NODE)), mail[3:])
        await self.put(base.SendMail(node=NODE, message=b"late"), base.MailReceived(node=NODE, through=mail[4].key))
        same("mail that came meanwhile", await self.messages(), [b"late"])
        same("the other's mail", await self.messages(OTHER), [b"theirs"])
        same("mail of an unknown node", list(await self.store.mail(NodeId("unknown"))), [])

    async def promise_10_mail_is_read_a_page_at_a_time_and_has_a_limit(self) -> None:
        await self.store.join(OTHER)
        posts = [base.SendMail(node=NODE, message=b"%d" % number) for number in range(base.MAX_MAIL + 100)]
        # Many commits: one of so many steps may take a store longer than one operation may.
        refusals: list[base.StepRefusal | None] = []
        for start in range(0, len(posts), 500):
            refusals += await self.put(*posts[start : start + 500])
        refused(refusals, *range(base.MAX_MAIL, base.MAX_MAIL + 100), why=MailFull)
        await self.accept(base.SendMail(node=OTHER, message=b"theirs"))
        page = list(await self.store.mail(NODE))
        wanted = [post.message for post in posts[: base.MAIL_AT_ONCE]]
        same("the first page", [message for _, message in page], wanted)
        (after, _), *_ = await self.store.mail(NODE, after=page[-1].key)
        same("the next page begins later", after > page[-1].key, True)
        await self.put(base.MailReceived(node=NODE, through=page[-1].key + base.MAX_MAIL * 2))
        await self.accept(*posts[:64])

    async def promise_10_mail_becomes_visible_in_the_order_of_its_keys(self) -> None:
        """Three nodes post at once to a fourth, which takes away what it has read: nothing unread goes with that."""
        each = 60

        async def post(store: base.Store, sender: int) -> None:
            for number in range(each):
                mail = base.SendMail(node=NODE, message=b"%d %d" % (sender, number))
                accepted(await store.commit([mail]))
                for _ in range((number * 7 + sender) % 3):
                    await asyncio.sleep(0)

        seen: list[base.Mail] = []
        async with self.elsewhere() as second, self.elsewhere() as third:
            stores = enumerate((self.store, second, third))
            posting = [asyncio.create_task(post(store, sender)) for sender, store in stores]
            over = False
            while not over:
                over = all(task.done() for task in posting)  # what is read after that is the rest
                while page := await self.store.mail(NODE, after=seen[-1].key if seen else 0):
                    seen += page
                    await self.put(base.MailReceived(node=NODE, through=page[-1].key))
                await asyncio.sleep(0)
            await asyncio.gather(*posting)
        for sender in range(3):
            wanted = [b"%d %d" % (sender, number) for number in range(each)]
            of_sender = [message for _, message in seen if message.startswith(b"%d " % sender)]
            same(f"what was read of sender {sender}, of which the rest went unread", of_sender, wanted)
        same("keys in order", [key for key, _ in seen], sorted({key for key, _ in seen}))

    async def promise_10_mail_is_received_together_with_what_came_of_it_or_not_at_all(self) -> None:
        await self.put(base.SendMail(node=NODE, message=b"say it"))
        (mail,) = await self.store.mail(NODE)
        done = (self.append(1), base.MailReceived(node=NODE, through=mail.key))
        for _ in range(2):
            await self.accept(*done)
            same("mail", await self.messages(), [])
            same("events", await self.numbers(), [1])

    async def promise_10_a_message_for_an_unknown_node_is_refused_and_its_neighbours_are_not(self) -> None:
        refusals = await self.put(
            self.append(1),
            base.SendMail(node=NodeId("unknown"), message=b"lost"),
            base.SendMail(node=NODE, message=b"found"),
        )
        refused(refusals, 1, why=NodeGone)
        same("events", await self.numbers(), [1])
        same("mail", await self.messages(), [b"found"])

    async def promise_10_the_heir_gets_the_mail_of_the_node_it_buries(self) -> None:
        await self.store.join(OTHER)
        for number in range(3):
            await self.put(base.SendMail(node=OTHER, message=b"theirs %d" % number))
            await self.put(base.SendMail(node=NODE, message=b"ours %d" % number))
        ours = list(await self.store.mail(NODE))
        await self.store.leave(OTHER)
        await self.store.bury(OTHER, heir=NODE)
        inherited = [message for message in await self.messages() if message.startswith(b"theirs")]
        same("mail of the node that was buried", inherited, [b"theirs 0", b"theirs 1", b"theirs 2"])
        await self.put(base.MailReceived(node=NODE, through=ours[-1].key))
        same("mail that the heir had not seen", await self.messages(), inherited)
        refused(await self.put(base.SendMail(node=OTHER, message=b"late")), 0, why=NodeGone)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        await self.store.bury(OTHER, heir=NODE)
        same("mail, after another burial", await self.messages(), inherited)


class LivenessChecks(StreamCase):
    """Promises 11 and 15: which nodes are dead, and which hold what is not written."""

    now = 1_000.0
    """The time on a monotonic clock that stands still until a check sets it."""

    def _view(self, node: NodeId, store: base.Store | None = None) -> base.Liveness:
        return (store or self.store).liveness(node, lease=LEASE, monotonic=lambda: self.now)

    async def promise_11_a_node_that_lives_is_never_dead(self) -> None:
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            views = [self._view(NODE), self._view(OTHER, elsewhere)]
            for number in range(12):
                for view in views:
                    await view.beat(b'{"beat":%d}' % number)
                    same("dead nodes", list(await view.dead()), [])
                    same("whether the claims hold", view.holds, True)
                self.now += LEASE / 5
            facts = {node.id: node.facts for node in await self.store.nodes()}
            same("what they told of themselves", facts, dict.fromkeys((NODE, OTHER), b'{"beat":11}'))
            same("nodes of known age", set(views[0].ages()) >= {NODE}, True)
            await elsewhere.leave(OTHER)

    async def promise_11_a_node_that_left_is_dead_until_it_is_buried(self) -> None:
        mine = self._view(NODE)
        await self.open_stream("read")
        async with self.elsewhere() as elsewhere:
            fence = await elsewhere.join(OTHER)
            await self.store.join(THIRD)
            theirs, third = self._view(OTHER, elsewhere), self._view(THIRD)
            left = a_stream(fence, "left behind", node=OTHER)
            reader = a_reader(stream="read", node=OTHER)
            accepted(await put(elsewhere, base.OpenStream(record=left), base.PutReader(record=reader)))
            for view in (mine, theirs, third):
                await view.beat(b"{}")
            same("dead nodes", list(await mine.dead()), [])
            await elsewhere.leave(OTHER)
            same("dead nodes", list(await mine.dead()), [OTHER])
            same("whether the claims of a node that left hold", theirs.holds, False)
        same("what it wrote", list(await self.store.written_by(OTHER)), [left])
        claimed = await self.store.claim(left.id, node=NODE, held=left.fence)
        same("the stream that was claimed", claimed and replace(claimed, fence=fence, node=OTHER, generation=1), left)
        read = await self.store.bury(OTHER, heir=NODE)
        same("streams that it read", [stream.id for stream in read], ["read"])
        same("their reader", await self.store.reader(StreamId("read")), None)
        same("dead nodes", list(await mine.dead()), [])
        same("nodes", {node.id for node in await self.store.nodes()}, {NODE, THIRD})
        await self.store.leave(THIRD)

    async def promise_11_a_node_that_leaves_nothing_behind_is_gone(self) -> None:
        await self.store.join(OTHER)
        await self.store.leave(OTHER)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        same("dead nodes", list(await self._view(NODE).dead()), [])
        await self.store.leave(OTHER)

    async def promise_15_a_node_that_holds_is_named_until_it_holds_nothing_more(self) -> None:
        mine = self._view(NODE)
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            same("holders, before any node is one", [list(await view.holders()) for view in (mine, theirs)], [[], []])
            for _ in range(2):
                theirs.hold(True)
                same("holders, as another node sees them", list(await mine.holders()), [OTHER])
                same("other holders, as the holder sees them", list(await theirs.holders()), [])
            mine.hold(True)
            same("two holders", [list(await mine.holders()), list(await theirs.holders())], [[OTHER], [NODE]])
            for view in (mine, theirs):
                view.hold(False)
                view.hold(False)
            try:  # a look of another process may be in the way for a moment
                async with asyncio.timeout(self.patience):
                    while any([await view.holders() for view in (mine, theirs)]):
                        for view in (mine, theirs):
                            await view.dead()  # a round, as each node makes them
                        await asyncio.sleep(0.01)
            except TimeoutError:
                raise AssertionError("a node that holds nothing is still named") from None
            same("dead nodes", list(await mine.dead()), [])
            await elsewhere.leave(OTHER)

    async def promise_15_a_node_that_is_gone_holds_nothing(self) -> None:
        mine = self._view(NODE)
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            theirs.hold(True)
            same("holders", list(await mine.holders()), [OTHER])
            await elsewhere.leave(OTHER)
            same("holders, when it has left", list(await mine.holders()), [])
            theirs.hold(True)
            same("holders, whatever a node says that has left", list(await mine.holders()), [])
