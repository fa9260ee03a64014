"""Engines: what runs one optimizer step of a Plan. Each has the interface of `NativeEngine`."""
