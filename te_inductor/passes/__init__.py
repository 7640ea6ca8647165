"""Graph passes, one folder a stage: `pre_grad` (Dynamo's graph), `joint` (AOTAutograd's), `post_grad` (Inductor's)."""
