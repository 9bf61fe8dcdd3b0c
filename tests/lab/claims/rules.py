"""What is asked of the rule of every claim: all three verdicts, from results that were made up."""

from batchnorm.lab.judge.claim import Part
from batchnorm.records import plain

KINDS = ("confirmed", "refuted", "inconclusive")


def check_rule(claim, results_of, budget="quick"):
    """Feed the rule one set of results for each kind of verdict, and draw every one of them.

    ``results_of(kind)`` returns one result for each part of the budget. What is fed is what a store would hold.
    """
    options = claim.parts(budget)
    for kind in KINDS:
        results = results_of(kind)
        assert len(results) == len(options), f"{len(options)} parts, {len(results)} results"
        parts = [Part(own, plain(result)) for own, result in zip(options, results, strict=True)]
        judgement = claim.judge(parts)
        assert judgement.outcome == kind, f"{kind} was expected: {judgement}"
        assert judgement.estimates
        assert judgement.sentence.endswith(".")
        assert claim.draw(parts), "nothing is drawn"
