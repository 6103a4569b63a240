"""Checks of the arguments of splits."""


def check_num_clients(num_clients: int, most: int, what: str) -> None:
  """Checks the number of clients.

  Args:
    num_clients: The number of clients.
    most: The largest possible number.
    what: The noun that `most` counts in the error, such as 'writers in emnist'.

  Raises:
    ValueError: If the number is less than 1 or more than `most`.
  """
  if num_clients < 1:
    raise ValueError(f'num_clients={num_clients} is too small; use at least 1.')
  if num_clients > most:
    raise ValueError(
        f'num_clients={num_clients} asks for more clients than the {most}'
        f' {what}; use at most {most}.'
    )
