"""Search for the cheapest plan that fits."""

from zerojax.search.candidates import Candidate, list_candidates
from zerojax.search.page import search_dict, search_page
from zerojax.search.result import SearchResult, Trial
from zerojax.search.searching import search

__all__ = [
    "Candidate",
    "SearchResult",
    "Trial",
    "list_candidates",
    "search",
    "search_dict",
    "search_page",
]
