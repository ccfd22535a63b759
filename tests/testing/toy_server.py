"""A store on a network, as small as one can be: a server of blocks, and the backend that uses it.

A request is an operation, a key and a value with its length; an answer a status and a value with
its length and checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import struct
import threading
import time
import zlib

from kvconnect.backend import Backend, Capabilities

REQUEST = struct.Struct("<c32sQ")
ANSWER = struct.Struct("<BQI")


class ToyServer:
    """Listens on one port for all its life; values survive a restart unless it is `empty`."""

    def __init__(self):
        self.values = {}
        self.port = 0
        self.start()

    def start(self):
        self.connections = set()

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self.server = Server(("127.0.0.1", self.port), _handler(self))
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self, *, empty):
        self.stop()
        if empty:
            self.values.clear()
        self.start()


def _handler(toy):
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            toy.connections.add(self.request)
            try:
                while len(head := self.rfile.read(REQUEST.size)) == REQUEST.size:
                    self.answer(*REQUEST.unpack(head))
            except OSError:
                pass
            finally:
                toy.connections.discard(self.request)

        def answer(self, operation, key, length):
            value, found = b"", key in toy.values
            if operation == b"S":
                data = self.rfile.read(length)
                if len(data) == length:  # else the client is gone
                    toy.values[key] = data
            elif operation == b"D":
                toy.values.pop(key, None)
            elif operation == b"G" and found:
                value = toy.values[key]
            self.wfile.write(ANSWER.pack(found, len(value), zlib.crc32(value)) + value)

    return Handler


def check(answer_is_sound):
    if not answer_is_sound:
        raise ConnectionError("a damaged answer")


class ToyBackend(Backend):
    """A connection for each call at a time; one that fails is not used again."""

    capabilities = Capabilities(shared=True)

    def __init__(self, host, port):
        self.address = (host, port)
        self.idle = []
        self.used = set()
        self.closed = False

    async def open(self, layouts, access="store"):
        await self.ask(b"L", b"\0" * 32)

    async def close(self):
        self.closed = True
        for _, writer in [*self.idle, *self.used]:
            writer.transport.abort()
        self.idle.clear()

    async def ask(self, operation, key, data=b""):
        if self.closed:
            raise ConnectionError("is closed")
        connection = self.idle.pop() if self.idle else await asyncio.open_connection(*self.address)
        self.used.add(connection)
        reader, writer = connection
        try:
            check(not self.closed)
            writer.write(REQUEST.pack(operation, key, len(data)) + data)
            await writer.drain()
            head = await reader.readexactly(ANSWER.size)
            found, length, checksum = ANSWER.unpack(head)
            value = await reader.readexactly(length if found <= 1 and length < 1 << 30 else 0)
            check(found <= 1 and zlib.crc32(value) == checksum and len(value) == length)
        except BaseException:
            writer.transport.abort()
            raise
        else:
            self.idle.append(connection)
        finally:
            self.used.discard(connection)
        return found, value

    async def lookup(self, keys):
        for number, key in enumerate(keys):
            if not (await self.ask(b"L", key))[0]:
                return number
        return len(keys)

    async def load(self, keys, into):
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            found, value = await self.ask(b"G", key)
            if not found or len(value) != len(buffer):
                return number
            buffer.numpy().data[:] = value
        return len(keys)

    async def save(self, blocks):
        for block in blocks:
            await self.ask(b"S", block.key, bytes(block.data.numpy().data))
        return len(blocks)

    async def delete(self, keys):
        for key in keys:
            await self.ask(b"D", key)


class StaysBroken(ToyBackend):
    """Once a call failed, or was slow, none works again."""

    broken = False

    async def ask(self, operation, key, data=b""):
        if self.broken:
            raise ConnectionError("broken")
        start, self.broken = time.monotonic(), True
        answer = await super().ask(operation, key, data)
        self.broken = time.monotonic() - start > 0.15
        return answer


class TakesPartOfAnAnswer(ToyBackend):
    async def load(self, keys, into):
        try:
            return await super().load(keys, into)
        except ConnectionError:
            return len(keys)


class ConnectsLater(ToyBackend):
    async def open(self, layouts, access="store"):
        pass


class ClosesSlowly(ToyBackend):
    async def close(self):
        await super().close()
        time.sleep(1.5)  # noqa: ASYNC251 - this is what is wrong with it
