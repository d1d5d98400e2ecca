"""The shop's tool as a workflow of DBOS on a SQLite file: `python -m tests.support.peers.dbos_shop`, in an environment
that has DBOS. A second process continues the workflow, and prints its outcome."""

from __future__ import annotations

import asyncio
import os

from dbos import DBOS, SetWorkflowID  # type: ignore[import-not-found]

from tests.support.peers.shop import STEPS, die_at, effect


@DBOS.step()  # type: ignore[untyped-decorator]
async def step(name: str) -> str:
    return effect(name)


@DBOS.workflow()  # type: ignore[untyped-decorator]
async def order() -> str:
    values = []
    for name in STEPS:
        values.append(await step(name))
        die_at(f"after {name}")
    return " ".join(values)


async def main() -> None:
    url = f"sqlite:///{os.environ['SHOP_FOLDER']}/dbos.db"
    DBOS(config={"name": "shop", "system_database_url": url, "log_level": "ERROR"})
    DBOS.launch()
    with SetWorkflowID("order"):
        handle = await DBOS.start_workflow_async(order)
    print(await handle.get_result())
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main())
