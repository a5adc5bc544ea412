"""The engine: the step loop, its messages, and the asyncio face of both."""
