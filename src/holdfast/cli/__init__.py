"""The command line: the face for people and scripts. It alone prints, exits and reads the environment."""
