"""A parser of arguments whose errors are one sentence: the value, the rule and the remedy, without the usage."""

import argparse
import re
from typing import NoReturn


class SentenceParser(argparse.ArgumentParser):
    """Exits with 2 and a line, where argparse prints the usage of every option before its error.

    Attributes:
        example: the arguments of a command that runs; empty: those that are required.
    """

    example = ""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and what to write, and exit with 2."""
        self.exit(2, f"memkit: error: {self._sentence(message)}\n")

    def _sentence(self, message: str) -> str:
        help_ = f"`{self.prog} --help` explains"
        if match := re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL):
            return (
                self._of_option(match[1].partition("/")[0], match[2])
                or f"{match[1]}: {match[2]}; {help_} it."
            )
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            example = f"{self.prog} {self.example or self._shortest()}"
            return f"{self.prog} needs {match[1]}: write `{example}`; {help_} the others."
        if match := re.fullmatch(r"unrecognized arguments: (.*)", message):
            return f"{self.prog} has no argument {match[1]!r}; {help_} those that it has."
        return f"{self.prog}: {message}; {help_} more."

    def _of_option(self, name: str, message: str) -> str:
        action = next((one for one in self._actions if name in (*one.option_strings, one.metavar)), None)
        if action is None:
            return ""
        choices = [str(choice) for choice in action.choices or ()]
        if message.startswith("expected "):
            example = choices[0] if choices else action.metavar or action.default
            return f"{name} stands without its value: write `{name} {example}`" + (
                f", or another of {', '.join(choices)}."
                if choices
                else f", or `{self.prog} --help` for what it takes."
            )
        if match := re.match(r"invalid choice: '?([^'\s]*)'? \(choose from", message):
            return f"{name} {match[1]!r} is unknown; write one of {', '.join(choices)}."
        if match := re.match(r"invalid (\w+) value: (.*)", message):
            kind = {"float": "a number", "int": "a whole number"}.get(match[1], f"a {match[1]}")
            return f"{name} {match[2]} is not {kind}: write `{name} {action.default}`, say."
        return ""

    def _shortest(self) -> str:
        """The arguments that can't be left out, by their names in the help."""
        said = [
            f"{one.option_strings[0]} {one.metavar or one.dest.upper()}"
            if one.option_strings
            else str(one.metavar)
            for one in self._actions
            if one.required
        ]
        return " ".join(said)
