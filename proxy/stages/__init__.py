"""The stages one by one, for clients that run the others themselves.

What a stage does here is what the pipeline does with its own requests: the same rendering, the same pools, the same
`ChoiceStream`. Nothing is kept between calls.
"""
