"""A training run small enough for a laptop, over the whole chain.

Sampler processes run a small policy, answer in an inference engine's flat format and put the
replies into a store; a trainer takes them as a consumer, computes the loss, steps, publishes its
weights to the samplers and releases what it has trained on. The samplers run a coarsely rounded
copy of the weights, as an engine with quantised weights does, so that trainer and engine never
agree exactly.

The task has nothing to learn: an episode's reward is a coin that the environment throws and shows
to the policy. The right thing to do is to stay where one is, so every movement is drift. Twice the
same run, once with the plain policy gradient and once with the score-centering loss:

    python -m rollstore.example --plot drift.png
"""
