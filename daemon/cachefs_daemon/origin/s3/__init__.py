"""The origin `s3://`: listings and credentials through aiobotocore, GETs of objects through the HTTP client of our own.

Imported when the first dataset of the kind is opened, since aiobotocore takes 0.5 s to import.
"""
