"""Which plan is the cheapest that fits: candidates, the order they are tried in, what was found.

Knows settings, formulas and forecasts; compiles through what it is given, and never runs a plan.
"""

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
