"""Searches for the cheapest plan that fits into memory, and then for its communication bucket
sizes."""

from zerojax.forecasting.settings_search.buckets import search_buckets
from zerojax.forecasting.settings_search.candidates import (
    LIST_REMATS,
    REMATS,
    Candidate,
    list_candidates,
    own_candidate,
)
from zerojax.forecasting.settings_search.rounds import SearchedRun, find_settings
from zerojax.forecasting.settings_search.search_result import (
    BucketSearch,
    BucketTrial,
    SearchResult,
    Trial,
    chosen_words,
    search_dict,
    search_page,
)
from zerojax.forecasting.settings_search.searching import search

__all__ = [
    "LIST_REMATS",
    "REMATS",
    "BucketSearch",
    "BucketTrial",
    "Candidate",
    "SearchResult",
    "SearchedRun",
    "Trial",
    "chosen_words",
    "find_settings",
    "list_candidates",
    "own_candidate",
    "search",
    "search_buckets",
    "search_dict",
    "search_page",
]
