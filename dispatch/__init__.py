"""What happens to an aten op: the class table, the rule tables, graphs; a folder for what each type needs of that."""
