"""The networks of a run: encoder and memory, actor and critic, action values."""
