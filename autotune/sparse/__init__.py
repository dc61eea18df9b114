"""Which way sparse gradients go: how often rows are touched, what each way would take, which are tried."""
