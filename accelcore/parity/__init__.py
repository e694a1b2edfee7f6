"""Record a training run, replay it elsewhere, and name the first place where the two part.

`accelcore.Record` and `accelcore.Replay` are the public names; `accelcore record` and `accelcore replay` are the same
for a script. Nothing else in accelcore imports this package. One file has one idea:

    record     the recording of a training: `Record`
    replay     a recording, weights and random numbers given to another run: `Replay`
    collector  hooks on modules, parameters and optimizers, and the events that they see
    finder     models and optimizers that were not named
    operators  the operators of some steps: what they returned, and whether that is right
    events     one event: what was seen where, and a sample of it
    recording  files of a recording
    settings   what of the environment, the model and the optimizer can change numbers
    compare    two recordings: the first event that parts
    cause      whether a difference begins where it was seen first
    rounding   how far two values may be apart
    result     what a comparison found
    page       the result as a page with plots
    script     the program that records or replays a script
    layers     two ways of running one model, side by side
    logprobs   the log-probabilities of two ways: `compare_logprobs`
    batch_size a batch whole, and some of its rows at a time
    msprobe    dumps of Ascend's msprobe as a reference
"""
