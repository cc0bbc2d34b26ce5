"""Chats: records, templates, and the tokens of answers, into a text set."""

from zerojax.data.chats.chat_preparation import PreparedChats, prepare_chats

__all__ = ["PreparedChats", "prepare_chats"]
