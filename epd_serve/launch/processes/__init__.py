"""Processes of a deployment on one host: started, watched, started again."""
