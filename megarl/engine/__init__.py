"""Generating, and all that knows SGLang: processes, requests, replies, weights, and which engine gets a request."""
