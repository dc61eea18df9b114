"""`sirtakirun`: starts the ranks of a job."""
