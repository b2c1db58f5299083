"""An app whose tasks take a JobSession, on either driver: `-A tests.flow.session_tasks:asyncpg_app`."""

import asyncio
import os
from uuid import UUID

import sqlalchemy
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from aioqueue import AioQueue, WorkerSettings
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.settings import LeaseSettings


class Base(DeclarativeBase):
    pass


class Counted(Base):
    """A row of the flow's (tests/flow/processes.py)."""

    __tablename__ = "counted"
    __table_args__ = {"schema": "flow"}  # noqa: RUF012 - SQLAlchemy's own form
    job_id: Mapped[UUID] = mapped_column(primary_key=True)


async def stored(session: JobSession) -> None:
    """Write one row in the job's own transaction: what is pending goes with its end."""
    session.add(Counted(job_id=session.job_id))
    await asyncio.sleep(0.01)


def made(driver: str) -> AioQueue:
    url = sqlalchemy.make_url(os.environ["AIOQUEUE_DSN"]).set(drivername=f"postgresql+{driver}")
    new = AioQueue(
        schema=os.environ["AIOQUEUE_SCHEMA"],
        session=async_sessionmaker(create_async_engine(url, pool_size=10)),
        lease=LeaseSettings(lease=1.5, rescue_interval=0.2),
        worker=WorkerSettings(poll=0.2),
    )
    new.task(name="stored")(stored)
    return new


psycopg_app, asyncpg_app = made("psycopg"), made("asyncpg")
